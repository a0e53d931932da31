"""Log-probabilities of prompts are those of their tokens, whatever step of theirs is run again."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import INTERNAL_ERROR, SamplingParams, Tier
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.executors.contract import StartedExecutor
from neaptide.executors.vllm.worker import take_scores
from tests.executors.vllm.inside.faults import EVERYWHERE, Raises, num_failed_steps, vllm
from tests.executors.vllm.inside.runs import Run, assert_greedy, prompts

Checkpoint = tuple[Path, PreTrainedModel]
TOP = 2
NUM_CHUNKS = 4
"""Of a prompt of 60 tokens, in steps of 16 beside one that decodes."""


@torch.no_grad()
def assert_scored(model: PreTrainedModel, prompt: list[int], scores: list[TokenLogprobs]) -> None:
    expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    assert [score.token_id for score in scores] == prompt[1:]
    for position, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[position, score.token_id]), abs=1e-3)
        assert score.top_logprobs == pytest.approx(expected[position].topk(TOP).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("chunk", [NUM_CHUNKS - 2, NUM_CHUNKS - 1])
def test_a_chunk_that_is_run_again(
    checkpoint: Checkpoint,
    started: StartedExecutor,
    where: str,
    depth: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At depth 1 the one behind it is, too."""
    num_steps = 0

    def due(ids: Collection[str]) -> str | None:
        nonlocal num_steps
        num_steps += "scored" in ids
        return where if "scored" in ids and num_steps == chunk + 1 else None

    raises = Raises(vllm(started)._workers, due, monkeypatch)
    run = Run(started.executor, overlap_depth=depth, max_num_batched_tokens=16)
    other, scored = prompts(2, seed=31, low=60, high=61)
    run.add("other", other, max_tokens=40)
    while not run.tokens["other"]:
        run.step()
    run.add("scored", scored, prompt_logprobs=TOP)
    run.finish()
    assert raises.num_raised == num_failed_steps(caplog) == 1
    assert run.ends["scored"].error is None
    assert run.ends["other"].error is None
    assert_scored(checkpoint[1], scored, run.prompt_logprobs["scored"])
    assert_greedy(checkpoint[1], scored, run.tokens["scored"])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [2, NUM_CHUNKS, NUM_CHUNKS + 1])
def test_a_prompt_that_is_preempted(
    checkpoint: Checkpoint, started: StartedExecutor, depth: int, num_steps: int
) -> None:
    """At depth 1 its chunk in flight is computed in vain."""
    run = Run(started.executor, overlap_depth=depth, max_num_batched_tokens=16)
    (scored,) = prompts(1, seed=32, low=60, high=61)
    run.add("scored", scored, Tier.FLEX, prompt_logprobs=TOP)
    for _ in range(num_steps):
        run.step()
    run.preempt(run.core.scheduler.queues.running_offline["scored"])
    run.finish()
    assert run.ends["scored"].num_preemptions == 1
    assert_scored(checkpoint[1], scored, run.prompt_logprobs["scored"])
    assert_greedy(checkpoint[1], scored, run.tokens["scored"])


def test_scores_that_are_missing_or_of_other_tokens_end_their_request_alone(
    started: StartedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a runner that does not do what it is taken to do."""
    executor = vllm(started)
    ask = executor._ask

    def asked(what: Any, parts: list[Any]) -> Any:
        answer = ask(what, parts)
        if what is not take_scores:
            return answer
        scores, *_ = answer.result()
        scores["shifted"] = tuple(part[::-1] for part in scores["shifted"])
        del scores["missing"]
        return SimpleNamespace(result=lambda: [scores])

    monkeypatch.setattr(executor, "_ask", asked)
    names = ("missing", "shifted", "well")
    (prompt,) = prompts(1, seed=33, low=20, high=21)
    parts = [ScheduledRequest(name, prompt[:16], 0, [i], False, 0) for i, name in enumerate(names)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=TOP)
    plan = StepPlan.of_parts(0, parts, [NewRequest(name, prompt, params) for name in names])
    result = executor.submit(plan).wait()
    executor.submit(StepPlan.of_parts(1, [], finished_ids=names)).wait()
    assert result.errors == {"missing": INTERNAL_ERROR, "shifted": INTERNAL_ERROR}
    assert [score.token_id for score in result.prompt_logprobs["well"]] == prompt[1:17]
