"""What the engine takes from a step that had to be run in parts, and from one that computes a prompt again."""

from collections.abc import Callable

import pytest

from neaptide.engine.interfaces import Prediction
from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import FinishReason, SamplingParams
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.executors.simulated.hash_executor import SimHandle
from tests.engine.harness import Harness, flex, online


class Notes:
    """Implements ``CostModel``: ten milliseconds a step, and notes what it learns from."""

    def __init__(self) -> None:
        self.observed: list[tuple[int, float]] = []

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(0.01, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self.observed.append((shape.num_tokens, round(seconds, 6)))


def raising_with(request_id: str, submit: Callable[[StepPlan], SimHandle]) -> Callable[[StepPlan], SimHandle]:
    def spoiled(plan: StepPlan) -> SimHandle:
        if request_id in plan.request_ids:
            raise RuntimeError("a bug in the executor")
        return submit(plan)

    return spoiled


def test_the_cost_model_learns_nothing_from_a_step_that_was_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Notes()
    harness = Harness(cost_model=costs)
    monkeypatch.setattr(harness.executor, "submit", raising_with("poison", harness.executor.submit))
    for name, num_tokens in {"a": 3, "poison": 4, "b": 5}.items():
        harness.core.handle(online(name, [7] * num_tokens, max_tokens=2))
    assert harness.step() == {"a": 3, "poison": 4, "b": 5}
    assert harness.reason("poison") is FinishReason.ERROR
    assert costs.observed == []
    harness.step()
    assert costs.observed == [(2, 0.01)]


def scoring_prompts(submit: Callable[[StepPlan], SimHandle]) -> Callable[[StepPlan], SimHandle]:
    """An executor's ``submit`` that scores every prompt token but the first; its log-probability is its position."""

    def scored(plan: StepPlan) -> SimHandle:
        handle = submit(plan)
        for part, start, count in zip(
            plan.scheduled, plan.num_computed.tolist(), plan.num_tokens.tolist(), strict=True
        ):
            request = plan.table.request(int(plan.rows[plan.request_ids.index(part.request_id)]))
            end = min(start + count, request.num_prompt_tokens - 1)
            scores = [TokenLogprobs(request.prompt_token_ids[p + 1], float(-p - 1), [], []) for p in range(start, end)]
            handle.result.prompt_logprobs[part.request_id] = scores
        return handle

    return scored


def test_prompt_logprobs_that_are_computed_again_after_a_preemption_stand_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(num_blocks=8, max_num_batched_tokens=16)
    monkeypatch.setattr(harness.executor, "submit", scoring_prompts(harness.executor.submit))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    harness.core.handle(flex("f", list(range(100, 124)), params=params))
    assert harness.step() == {"f": 16}
    harness.core.handle(online("a", [7] * 18, max_tokens=2))
    harness.run()
    (end,) = harness.ends["f"]
    assert end.num_preemptions == 1
    assert end.prompt_logprobs is not None
    assert [scored.logprob for scored in end.prompt_logprobs] == [float(-p) for p in range(1, 24)]
