"""A simulated engine whose pool is planned as a server's is: by what has been seen of answers, again and again."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from neaptide.engine.offline.planning.occasions import LEAST_ROWS, PERIOD_S
from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.engine.record.step_log import OrderLine, StepLine, read_log
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.replay import Replay, replay
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import BASE, STEP_S, constant, profile

SHORT, LONG = 2, 40
"""Answers of the two kinds, of which nobody is told."""


def scene(num_rows: int = LEAST_ROWS, **fields: object) -> Scenario:
    """Two kinds of rows, by turns; each shares a prefix of one block."""
    rows = [
        TraceRequest(0.0, ((BASE + k % 2, 4), (BASE + 10 + k, 8)), LONG if k % 2 else SHORT) for k in range(num_rows)
    ]
    values: dict[str, object] = {
        "plan": DUAL_SCAN,
        "planner_is_told": False,
        "refill": False,
        "max_num_seqs": 32,
        "max_output_tokens": 200,
        "profile": profile(num_blocks=512),
    }
    return constant((), [OfflineSet("scene", rows, synthetic=True)], **(values | fields))


def plans_of(log: Path) -> list[tuple[float, OrderLine]]:
    """With the times of the steps before which they came."""
    found, waiting = [], list[OrderLine]()
    for line in read_log(log):
        if isinstance(line, OrderLine):
            waiting.append(line)
        elif isinstance(line, StepLine):
            found += [(line.t[0], one) for one in waiting]
            waiting = []
    return found


def expected(order: OrderLine, is_long: bool) -> set[int]:
    """Lengths of rows of a kind that have not started."""
    return {
        length for row, length in zip(order.rows, order.lasting_steps, strict=True) if row >= 0 and row % 2 == is_long
    }


def test_lengths_are_learnt_and_the_pool_is_planned_again(tmp_path: Path) -> None:
    run = simulate(scene(2000), step_log=tmp_path / "log")
    assert run.num_failed == 0
    plans = plans_of(tmp_path / "log")
    times_s = [at_s for at_s, _ in plans]
    assert times_s[0] == 0.0
    gaps_s = [later_s - at_s for at_s, later_s in pairwise(times_s)]
    assert len(gaps_s) >= 3
    assert gaps_s == [pytest.approx(PERIOD_S * 2**k, abs=2 * STEP_S) for k in range(len(gaps_s))]
    first, second = plans[0][1], plans[1][1]
    assert (expected(first, False), expected(first, True)) == ({200}, {200})  # the limit, below the prior
    assert first.first > 0
    assert second.first == 0
    assert expected(second, False) == {SHORT}
    assert min(expected(second, True)) >= LONG


def test_its_run_replays(tmp_path: Path) -> None:
    run = simulate(scene(), step_log=tmp_path / "log")
    assert plans_of(tmp_path / "log")
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)


def test_a_small_pool_is_not_planned(tmp_path: Path) -> None:
    simulate(scene(LEAST_ROWS - 1), step_log=tmp_path / "log")
    assert plans_of(tmp_path / "log") == []


def test_a_planner_that_is_told_plans_any_pool_once(tmp_path: Path) -> None:
    simulate(replace(scene(50), planner_is_told=True), step_log=tmp_path / "log")
    ((_, order),) = plans_of(tmp_path / "log")
    assert (expected(order, False), expected(order, True)) == ({SHORT}, {LONG})
