"""What the benchmark of planning says of steps: made ones, and a few real ones of a small engine."""

import gc
from pathlib import Path

from benchmarks.scheduling import Disturbances, StepTime, build, figures_of, measure, verdict, write_pool


def calm(plan_ms: float) -> StepTime:
    return StepTime(plan_ms, 2 * plan_ms, 1.5 * plan_ms, 0, 0, 0)


def test_a_bar_holds_at_the_99th_percentile() -> None:
    measured = [calm(step / 10) for step in range(1, 200)]
    at_19 = verdict(measured, 19.8)
    assert (at_19["p10_ms"], at_19["p50_ms"], at_19["p99_ms"], at_19["holds"]) == (2.0, 10.0, 19.8, True)
    below = verdict(measured, 19.7)
    assert (below["holds"], below["above_bar"], below["steps"]) == (False, 2, 199)


def test_steps_above_the_bar_that_nothing_outside_explains_are_told_apart() -> None:
    slow = [StepTime(9.0, 9.0, 9.0, *counts) for counts in ((1, 0, 0), (0, 2, 0), (0, 0, 3), (0, 0, 0))]
    found = verdict([*slow, calm(0.1), StepTime(0.1, 0.1, 0.1, 0, 1, 0)], 1.0)
    assert (found["above_bar"], found["above_bar_undisturbed"]) == (4, 1)
    assert found["disturbed"] == {"garbage collected": 1, "interrupted": 2, "new pages": 1}
    assert [each.disturbances for each in slow] == [["garbage collected"], ["interrupted"], ["new pages"], []]


def test_figures_have_the_processor_s_time_beside_the_time_that_passed() -> None:
    figures = figures_of([calm(1.0), calm(1.0), calm(4.0)])
    assert figures["step_mean_ms"] == 4.0
    assert [figures[f"{name}_p50_ms"] for name in ("step", "step_cpu", "plan_apply_commit")] == [2.0, 1.5, 1.0]


def test_collections_of_garbage_are_counted_while_they_are_watched() -> None:
    disturbances = Disturbances()
    disturbances.watch()
    disturbances.since_last()
    gc.collect()
    assert disturbances.since_last()[0] == 1
    assert disturbances.since_last()[0] == 0
    disturbances.end()
    gc.collect()
    assert disturbances.since_last()[0] == 0


def test_a_small_engine_is_measured_with_all_of_its_requests_running(tmp_path: Path) -> None:
    stem = str(tmp_path / "job")
    write_pool(stem, 20)
    core = build(8, 2, 20, "neaptide", stem)
    measured = measure(core, 8, 5)
    assert len(measured) == 5
    queues = core.scheduler.queues
    assert (queues.num_running, len(queues.running_online)) == (8, 2)
    assert all(0 < each.plan_ms < each.step_ms for each in measured)
    assert gc.get_freeze_count() == 0
