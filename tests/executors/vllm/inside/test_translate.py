"""What the runner is told after steps that raised, without a runner."""

from typing import Any

import pytest

from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.executors.vllm.sampling import to_vllm
from neaptide.executors.vllm.translate import RunnerKind, Translator

PROMPT = [7, 8, 9]


class Told:
    """Orders of plans in which each request computes its prompt in the first step and a token in every other."""

    def __init__(self, is_v2: bool) -> None:
        kind = RunnerKind(is_v2, is_async=False, vocab_size=256)
        self.translator = Translator(kind, lambda new: to_vllm(new.params, (), None))
        self.num_done: dict[str, int] = {}

    def plan(self, ids: str, new: str = "", finished: str = "") -> StepPlan:
        parts = []
        for i, name in enumerate(ids):
            done = 0 if name in new else self.num_done[name]
            self.num_done[name] = done + (1 if done else len(PROMPT))
            tokens = [11] if done else PROMPT
            parts.append(ScheduledRequest(name, tokens, done, list(range(8 * i, 8 * i + 8)), True, max(done - 2, 0)))
        requests = [NewRequest(name, PROMPT, SamplingParams(max_tokens=8)) for name in new]
        return StepPlan.of_parts(0, parts, requests, list(finished))

    def order(self, plan: StepPlan) -> Any:
        self.translator.heed(plan)
        return self.translator.order(plan)


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def told(request: pytest.FixtureRequest) -> Told:
    return Told(request.param)


def test_ends_of_both_steps_in_flight_are_told_again(told: Told) -> None:
    told.order(told.plan("xyz", new="xyz"))
    first, second = told.plan("z", finished="x"), told.plan("z", finished="y")
    assert [told.order(plan).finished_req_ids for plan in (first, second)] == [{"x"}, {"y"}]
    told.translator.distrust(first)
    told.translator.distrust(second)
    assert told.order(told.plan("z")).finished_req_ids == {"x", "y"}
    assert told.order(told.plan("z")).finished_req_ids == set()


@pytest.mark.parametrize("failed", ["x", "z"])
def test_a_request_that_was_told_anew_does_not_end(told: Told, failed: str) -> None:
    """Nor where the step that raises next is not its own."""
    told.order(told.plan("z", new="z"))
    plan = told.plan("xz", new="x")
    told.order(plan)
    told.translator.distrust(plan)
    again = told.order(told.plan("xz", new="x"))
    assert again.finished_req_ids == {"x"}
    assert [data.req_id for data in again.scheduled_new_reqs if data.req_id == "x"] == ["x"]
    told.translator.distrust(told.plan(failed))
    assert "x" not in told.order(told.plan("xz")).finished_req_ids


def test_a_request_that_was_told_again_after_a_preemption_is_not_forgotten() -> None:
    told = Told(is_v2=True)
    told.order(told.plan("xz", new="xz"))
    plan = told.plan("xz")
    plan.preempted_ids.append("x")
    assert told.order(plan).preempted_req_ids == {"x"}
    told.translator.distrust(told.plan("z"))
    assert told.order(told.plan("xz")).preempted_req_ids == {"z"}
