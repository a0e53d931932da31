"""A simulated engine that follows offline plans: when they come, what they change, that their runs replay."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.offline.planning.plan import ORDERS
from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.engine.record.step_log import OrderLine, RowLine, StepLine, read_log
from neaptide.estimator.device_profile import PlanningCost
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.replay import Replay, replay
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import constant, mixed, offline, profile

DENSE, LONG = (0, 40, 1), (8, 4, 30)
"""(shared, own, output) tokens: rows that want compute, and rows that want memory. What the long ones share tells the
planner that all of them are long."""


def admitted(log: Path) -> list[int]:
    return [handle for line in read_log(log) if isinstance(line, StepLine) for handle, _ in line.admit]


def one_at_a_time(rows: Sequence[tuple[int, int, int]], plan: str | None, log: Path, **fields: object) -> list[int]:
    """Handles (numbers of the rows) in the order of admission."""
    run = simulate(constant((), [offline(*rows)], plan=plan, refill=False, max_num_seqs=1, **fields), step_log=log)
    assert run.num_failed == 0
    return admitted(log)


def test_rows_run_in_the_planned_order(tmp_path: Path) -> None:
    rows = [(8, 4, 1), (0, 9, 1), (8, 3, 1), (0, 5, 1)]
    assert one_at_a_time(rows, None, tmp_path / "today", policy="fcfs") == [0, 1, 2, 3]
    order = one_at_a_time(rows, "neaptide", tmp_path / "planned", policy="fcfs")
    assert abs(order.index(0) - order.index(2)) == 1
    assert sorted(order) == [0, 1, 2, 3]


def test_a_plan_with_two_ends_takes_rows_of_both_kinds_from_the_begin(tmp_path: Path) -> None:
    order = one_at_a_time([DENSE] * 8 + [LONG] * 8, DUAL_SCAN, tmp_path / "log", max_num_batched_tokens=40)
    # One request at a time: what has ended holds nothing, so the right end, with the long answers, is always next.
    assert all(number >= 8 for number in order[:8])
    together = one_at_a_time([DENSE] * 8 + [LONG] * 8, None, tmp_path / "today")
    assert together == list(range(16))


def test_a_plan_comes_after_the_time_that_planning_takes(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(profile(), planning=PlanningCost(0.0, 0.0, pooled_row_s=0.09))
    rows = [(0, 9, 2)] * 6
    simulate(
        constant((), [offline(*rows)], plan="neaptide", refill=False, max_num_seqs=1, profile=slow),
        step_log=tmp_path / "log",
    )
    before_s = 0.0
    for line in read_log(tmp_path / "log"):
        if isinstance(line, StepLine):
            before_s = line.t[-1]
        elif isinstance(line, OrderLine):
            break
    assert before_s == pytest.approx(0.6)  # the end of the first step behind 0.54 s


def test_a_job_that_comes_later_is_planned_with_what_is_left(tmp_path: Path) -> None:
    requests = [TraceRequest(0.3 * (k // 4), ((2000 + k, 8),), 3) for k in range(8)]
    sets = [OfflineSet("scene", requests, synthetic=True)]
    simulate(constant((), sets, plan="neaptide", refill=False, max_num_seqs=1), step_log=tmp_path / "log")
    plans = [line.rows for line in read_log(tmp_path / "log") if isinstance(line, OrderLine)]
    assert sorted(plans[0]) == [0, 1, 2, 3]
    assert {4, 5, 6, 7} < set(plans[1])
    assert len(plans[1]) == len(set(plans[1])) < 8


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("order", [*ORDERS, DUAL_SCAN])
def test_a_run_with_plans_replays(order: str, depth: int, tmp_path: Path) -> None:
    slow = msgspec.structs.replace(profile(num_blocks=48), planning=PlanningCost(0.0, 0.0, pooled_row_s=0.005))
    scenario = mixed(num_online=12, plan=order, step_noise=0.1, cost_model=None, overlap_depth=depth, profile=slow)
    run = simulate(scenario, step_log=tmp_path / "log")
    lines = list(read_log(tmp_path / "log"))
    assert any(isinstance(line, OrderLine) for line in lines)
    if order in ("density", DUAL_SCAN):
        assert all(line.held_tokens and line.lasting_steps for line in lines if isinstance(line, OrderLine))
    assert any(isinstance(line, RowLine) for line in lines)
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)


def test_without_a_plan_nothing_is_planned(tmp_path: Path) -> None:
    simulate(mixed(num_online=4, num_rows=8), step_log=tmp_path / "log")
    assert not any(isinstance(line, OrderLine) for line in read_log(tmp_path / "log"))


@pytest.mark.parametrize(("order", "least"), [(DUAL_SCAN, 24)])
def test_lengths_that_callers_ask_for_are_known_to_the_planner(order: str, least: int, tmp_path: Path) -> None:
    """Behind one prefix the longest answers want the most memory: they stand near the end, and none is cut short."""
    lengths = [8, 30, 4, 24, 12, 16, 28, 20] * 4
    requests = [TraceRequest(0.0, ((1, 8), (2 + k, 4)), n, is_fixed=True) for k, n in enumerate(lengths)]
    run = simulate(
        constant((), [OfflineSet("fixed", requests, synthetic=True)], plan=order, refill=False),
        step_log=tmp_path / "log",
    )
    (planned,) = (line for line in read_log(tmp_path / "log") if isinstance(line, OrderLine))
    assert min(lengths[handle] for handle in planned.rows[-4:]) == least
    steps = run.measures.steps((float("-inf"), float("inf")))
    assert steps["output_tokens"].sum() == sum(lengths)


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_of_known_lengths_start_in_the_steps_of_a_timetable(depth: int, tmp_path: Path) -> None:
    """With all of the memory and nothing online; the run replays."""
    lengths = [8, 30, 4, 24, 12, 16, 28, 20] * 3
    rows = [TraceRequest(0.0, ((1, 8), (100 + k, 4)), n, is_fixed=True) for k, n in enumerate(lengths)]
    rows += [TraceRequest(0.0, ((500 + k, 40),), 1) for k in range(16)]
    alone = {"headroom": "fixed@0", "offline_max_kv_ratio": 1.0, "overlap_depth": depth}
    sets = [OfflineSet("fixed", rows, synthetic=True)]
    run = simulate(constant((), sets, plan=DUAL_SCAN, refill=False, **alone), step_log=tmp_path / "log")
    lines = list(read_log(tmp_path / "log"))
    (order,) = (line for line in lines if isinstance(line, OrderLine))
    steps = [line for line in lines[lines.index(order) :] if isinstance(line, StepLine)]
    admitted = {handle: number for number, line in enumerate(steps) for handle, _ in line.admit}
    starts = {handle: start for handle, start in zip(order.rows, order.starts, strict=True) if start >= 0}
    assert starts.keys() == {number for number, tokens in enumerate(lengths) if tokens >= 16}  # the others are dense
    assert {handle: admitted[handle] for handle in starts} == starts
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)
