"""Blocks that held what is not finite are named to the executor when no request holds them any more."""

import pytest

from neaptide.engine.params import NUMERICAL_ERROR
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.engine.steps.timer import StepTimer
from tests.engine.device import on_device
from tests.engine.harness import Harness, Watch, online


class Plans(Watch):
    """Keeps the blocks that each plan names, and those that stand in the tables of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.zeroed: list[list[int]] = []
        self.tables: list[dict[str, list[int]]] = []

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan = step.plan
        self.zeroed.append(list(plan.zero_blocks))
        self.tables.append({part.request_id: part.block_ids for part in plan.scheduled})


def watched(depth: int) -> tuple[Harness, Plans]:
    harness, device = on_device(overlap_depth=depth, num_blocks=16)
    device.not_a_number["bad"] = 0
    plans = Plans()
    harness.core.subscribe(plans)
    return harness, plans


@pytest.mark.parametrize("depth", [0, 1])
def test_they_are_named_once_in_the_plan_after_the_request_has_ended(depth: int) -> None:
    harness, plans = watched(depth)
    harness.core.handle(online("bad", [7] * 9))
    harness.core.handle(online("good", [8] * 9, max_tokens=20))
    harness.run()
    assert harness.ends["bad"][0].error == NUMERICAL_ERROR
    held = max((table["bad"] for table in plans.tables if "bad" in table), key=len)
    named = [blocks for blocks in plans.zeroed if blocks]
    assert [sorted(blocks) for blocks in named] == [sorted(held)]
    at = plans.zeroed.index(named[0])
    assert all("bad" not in table for table in plans.tables[at:])


def test_a_plan_that_is_run_in_parts_names_them_in_its_first_submission_only() -> None:
    harness, _ = watched(0)
    harness.core.handle(online("bad", [7] * 9))
    harness.core.handle(online("good", [8] * 9))
    harness.step()
    scheduler = harness.core.scheduler
    scheduler.zero([5])
    step = scheduler.apply(scheduler.draft(harness.clock.now()), StepTimer(harness.clock))
    assert step is not None
    assert 5 in step.plan.zero_blocks
    assert step.plan.part(step.plan.rows[:0]).zero_blocks == []


def test_blocks_that_another_request_holds_are_left_alone() -> None:
    harness, plans = watched(0)
    prefix = [9] * 8
    harness.core.handle(online("good", [*prefix, 10], max_tokens=12))
    harness.step()
    harness.core.handle(online("bad", [*prefix, 11]))
    harness.run()
    shared = plans.tables[0]["good"][:2]
    named = {block for blocks in plans.zeroed for block in blocks}
    assert named
    assert not named & set(shared)
