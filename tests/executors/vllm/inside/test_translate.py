"""What the runner is told after steps that raised, without a runner."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import BatchShape, NewRequest, ScheduledRequest, StepPlan
from neaptide.engine.table import RequestTable
from neaptide.executors.vllm.sampling import to_vllm
from neaptide.executors.vllm.scheduler_output import RunnerKind, Translator

PROMPT = [7, 8, 9]


class RunnerState:
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
def told(request: pytest.FixtureRequest) -> RunnerState:
    return RunnerState(request.param)


def test_ends_of_both_steps_in_flight_are_told_again(told: RunnerState) -> None:
    told.order(told.plan("xyz", new="xyz"))
    first, second = told.plan("z", finished="x"), told.plan("z", finished="y")
    assert [told.order(plan).finished_req_ids for plan in (first, second)] == [{"x"}, {"y"}]
    told.translator.invalidate(first)
    told.translator.invalidate(second)
    assert told.order(told.plan("z")).finished_req_ids == {"x", "y"}
    assert told.order(told.plan("z")).finished_req_ids == set()


@pytest.mark.parametrize("failed", ["x", "z"])
def test_a_request_that_was_told_anew_does_not_end(told: RunnerState, failed: str) -> None:
    """Nor where the step that raises next is not its own."""
    told.order(told.plan("z", new="z"))
    plan = told.plan("xz", new="x")
    told.order(plan)
    told.translator.invalidate(plan)
    again = told.order(told.plan("xz", new="x"))
    assert again.finished_req_ids == {"x"}
    assert [data.req_id for data in again.scheduled_new_reqs if data.req_id == "x"] == ["x"]
    told.translator.invalidate(told.plan(failed))
    assert "x" not in told.order(told.plan("xz")).finished_req_ids


def test_a_request_that_was_told_again_after_a_preemption_is_not_forgotten() -> None:
    told = RunnerState(is_v2=True)
    told.order(told.plan("xz", new="xz"))
    plan = told.plan("xz")
    plan.preempted_ids.append("x")
    assert told.order(plan).preempted_req_ids == {"x"}
    told.translator.invalidate(told.plan("z"))
    assert told.order(told.plan("xz")).preempted_req_ids == {"z"}


BLOCK_SIZE = 4


class History:
    """Plans on one table, most of the parts of the one before: requests go on, are preempted, undone and replaced."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.table = RequestTable(5, 400, BLOCK_SIZE)
        self.rows: list[int] = []
        self.new: list[NewRequest] = []
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.resumed: set[str] = set()
        self.num_blocks = self.num_requests = 0
        for row in range(self.table.num_slots):
            self._begin(row)

    def plans(self, count: int) -> Iterator[StepPlan]:
        for step in range(count):
            yield self._plan(step)
            if self.rng.random() < 0.3:
                self._change(self.rng.randrange(self.table.num_slots))
            if self.rng.random() < 0.2:
                self.rows = self.rng.sample(range(self.table.num_slots), self.rng.randint(1, self.table.num_slots))

    def _plan(self, step: int) -> StepPlan:
        table, rows = self.table, np.array(self.rows or [0], np.int64)
        start, total, prompt = table.computed[rows], table.total[rows], table.prompt[rows]
        for row in rows.tolist():
            held = int(table.blocks.num_blocks[row])
            ids = [self._block() for _ in range(held * BLOCK_SIZE, int(table.total[row]), BLOCK_SIZE)]
            table.blocks.append(row, ids + [self._block() for _ in range(self.rng.random() < 0.05)])
        ids = [table.ids[row] for row in rows.tolist()]
        new = [request for request in self.new if request.request_id in ids]
        plan = StepPlan(
            step,
            BatchShape(),
            table,
            rows,
            total - start,
            start,
            np.ones(len(rows), np.bool_),
            total - prompt,
            new_requests=new,
            finished_ids=self.finished,
            preempted_ids=self.preempted,
            resumed_ids=[name for name in ids if name in self.resumed],
        )
        self.new = [request for request in self.new if request not in new]
        self.finished, self.preempted, self.resumed = [], [], self.resumed.difference(ids)
        table.computed[rows] = total
        table.known[rows] = table.total[rows] = total + 1
        return plan

    def _change(self, row: int) -> None:
        table, name = self.table, self.table.ids[row]
        is_new = any(request.request_id == name for request in self.new)
        what = self.rng.choice(["preempted", "undone", "ends"])
        if what == "ends" or table.total[row] > 300:
            self.new = [request for request in self.new if request.request_id != name]
            self.finished += [] if is_new else [name]
            self.resumed.discard(name)
            self._begin(row)
        elif is_new:
            return
        elif what == "preempted":
            table.blocks.cut(row, 0)
            table.computed[row] = 0
            table.renew(row)
            self.preempted.append(name)
            self.resumed.add(name)
        elif table.total[row] - table.prompt[row] > 1:
            table.known[row] = table.total[row] = table.total[row] - 1
            table.computed[row] = min(table.computed[row], table.total[row] - 1)
            if self.rng.random() < 0.5:
                table.renew(row)

    def _begin(self, row: int) -> None:
        table, name = self.table, f"request {self.num_requests}"
        self.num_requests += 1
        table.blocks.cut(row, 0)
        table.ids[row], table.computed[row] = name, 0
        table.known[row] = table.total[row] = table.prompt[row] = len(PROMPT)
        table.renew(row)
        self.new.append(NewRequest(name, PROMPT, SamplingParams(max_tokens=400)))

    def _block(self) -> int:
        self.num_blocks += 1
        return self.num_blocks


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
def test_plans_of_the_same_parts_are_told_like_any_others(is_v2: bool, is_async: bool) -> None:
    def translator() -> Translator:
        return Translator(RunnerKind(is_v2, is_async, 256), lambda new: to_vllm(new.params, (), None))

    quick, careful, rng = translator(), translator(), random.Random(1)
    num_quick = 0
    for plan in History(seed=0).plans(2000):
        careful._rows._settle()
        num_quick += quick._rows._of_same_parts(plan) is not None
        orders = []
        for each in (quick, careful):
            each.heed(plan)
            orders.append(each.order(plan))
        assert orders[0] == orders[1]
        if rng.random() < 0.1:
            quick.invalidate(plan)
            careful.invalidate(plan)
    assert 500 < num_quick < 1900


def test_another_request_that_is_where_the_last_one_has_got_to_is_not_that_one() -> None:
    history = History(seed=0)
    translator = Translator(RunnerKind(False, False, 256), lambda new: to_vllm(new.params, (), None))
    for step, rows in enumerate(([0, 1], [1], [0], [1], [0])):
        history.rows = rows
        plan = history._plan(step)
        translator.heed(plan)
        told = translator.order(plan).scheduled_cached_reqs
        assert not told.resumed_req_ids
        assert told.req_ids == (plan.request_ids if step else [])
