"""The experiment over a machine with known step times, on a virtual clock."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.estimator.calibration.calibrate import QUICK, Calibration, Measurements
from neaptide.estimator.calibration.micro_runs import MicroRunner, shape_of
from neaptide.estimator.calibration.report import CalibrationReport, report
from neaptide.estimator.calibration.steps import CalibrationLimits
from neaptide.estimator.cost.iteration_time import Regime, StepSample, regime_of
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.subject import Subject
from neaptide_lab.experiments import cost_model_error
from neaptide_lab.experiments.cost_model_error import (
    LEAST_SHAPES,
    LEAST_STEPS,
    SLOW_DOWN,
    WINDOW_STEPS,
    Recovery,
    error_rows,
    measure_recovery,
    recorded,
    recovery_rows,
)
from tests.estimator.machine_executor import SAME_EVERYWHERE, MachineExecutor

LIMITS = CalibrationLimits(max_batched_tokens=1024, max_seqs=32, max_model_len=4096, kv_tokens=2048 * 16)
TRUTH = RooflineModel(SAME_EVERYWHERE)
PACE = replace(QUICK, max_rounds=1)


@pytest.fixture(scope="module")
def executor() -> MachineExecutor:
    return MachineExecutor(VirtualClock())


@pytest.fixture(scope="module")
def measured(executor: MachineExecutor) -> Measurements:
    return Calibration(MicroRunner(executor, executor.clock, 16), executor.clock, LIMITS, PACE).measure()


@pytest.fixture(scope="module")
def found(measured: Measurements) -> CalibrationReport:
    return report(measured)


def noisy_steps(measured: Measurements, noise: float) -> list[StepSample]:
    rng = random.Random(0)
    steps = recorded(measured)
    return [StepSample(s.shape, s.seconds * rng.lognormvariate(0.0, noise)) for s in rng.choices(steps, k=LEAST_STEPS)]


def test_steps_are_shown_in_the_order_in_which_they_ran(measured: Measurements) -> None:
    assert [(s.shape, s.seconds) for s in recorded(measured)] == [(shape_of(r.parts), r.seconds) for r in measured.runs]


def test_a_slow_down_is_followed_within_the_bound(measured: Measurements) -> None:
    recovery = measure_recovery(TRUTH, noisy_steps(measured, 0.02))
    assert recovery.slow_from == LEAST_STEPS // 2
    assert recovery.steps is not None
    assert WINDOW_STEPS <= recovery.steps <= 100
    assert recovery.late_error < 0.03
    assert recovery.coverage == pytest.approx(0.95, abs=0.015)
    assert all(row.holds is not False for row in recovery_rows("m", recovery))


def test_the_rolling_error_is_the_mean_of_its_window(measured: Measurements) -> None:
    steps = recorded(measured)
    recovery = measure_recovery(TRUTH, steps)
    assert len(recovery.rolling_error) == max(LEAST_STEPS, len(steps))
    assert max(recovery.rolling_error[: recovery.slow_from]) < 1e-6
    # One step into the slow-down the window holds one error, 1 - 1/1.5.
    assert recovery.rolling_error[recovery.slow_from] == pytest.approx((1 - 1 / SLOW_DOWN) / WINDOW_STEPS)


def test_a_model_that_never_recovers_is_shown_as_failing() -> None:
    row, _, coverage = recovery_rows("m", Recovery([0.2] * 1000, 500, None, 0.90, 0.05, 0.2))
    assert (row.ours, row.holds) == (500, False)
    assert "never" in row.case
    assert coverage.holds is False


def test_a_slow_recovery_fails() -> None:
    row, _, coverage = recovery_rows("m", Recovery([0.2] * 1000, 500, 101, 0.9349, 0.05, 0.2))
    assert row.holds is False
    assert coverage.holds is False


def test_every_model_and_regime_has_a_row_and_the_result_is_json(
    executor: MachineExecutor, found: CalibrationReport, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def fake(model: str, *_: Any, **__: Any) -> tuple[CalibrationReport, Subject]:
        asked.append(model)
        return found, Subject.of(executor, Path(model).name, 16)

    monkeypatch.setattr(cost_model_error, "calibrate_model", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = cost_model_error.run(quick=True)
    assert asked == ["neaptide-tiny"]
    assert any("tools/make_111m.py" in note for note in alone.notes)
    assert len(alone.rows) == 3 * 5 + 3
    (tmp_path / "neaptide" / "llama-111m").mkdir(parents=True)
    both = cost_model_error.run(quick=True)
    assert asked[1:] == ["neaptide-tiny", str(tmp_path / "neaptide" / "llama-111m")]
    assert len(both.rows) == 2 * len(alone.rows)
    for regime in Regime:
        (row,) = [row for row in alone.rows if row.case.startswith(f"neaptide-tiny {regime}: ours")]
        assert row.holds
        assert row.ours < 0.1
    json.dumps(both.to_json(), allow_nan=False)


def test_a_recovery_to_where_the_error_never_was_is_not_judged(measured: Measurements) -> None:
    recovery = measure_recovery(TRUTH, noisy_steps(measured, 0.2))
    assert recovery.early_error > 0.08
    row, _, coverage = recovery_rows("m", recovery)
    assert row.holds is None
    assert "not judged, before it was 1" in row.case
    assert coverage.holds is not None, "the margin makes up for noise"


def test_too_few_held_out_shapes_are_not_judged(
    executor: MachineExecutor, found: CalibrationReport, measured: Measurements
) -> None:
    mixed = [s for s in found.raw.held_out if regime_of(s.shape) is Regime.MIXED]
    others = [s for s in found.raw.held_out if regime_of(s.shape) is not Regime.MIXED]
    few = replace(found.raw, held_out=others + mixed[: LEAST_SHAPES - 1])
    report_of_few = replace(found, raw=few, normalised=few)
    judged = {row.case: row.holds for row in error_rows("m", report_of_few) if ": ours;" in row.case}
    assert list(judged.values()) == [True, True, None]
    assert list(judged)[2].endswith("4 shapes: not judged")
    (note,) = cost_model_error._not_judged("m", report_of_few, measure_recovery(TRUTH, recorded(measured)))
    assert note.startswith("m: not judged for want of held-out shapes, fewer than 5: mixed (4).")


def test_a_noisy_machine_is_told_to_be_quiet(found: CalibrationReport) -> None:
    (note,) = cost_model_error._not_judged("m", found, Recovery([0.2] * 1000, 500, None, 0.95, 0.12, 0.2))
    assert "too noisy" in note
    assert "12.0% before the slow-down" in note
    assert "Repeat it" in note


def test_the_plot_has_a_row_for_each_model(found: CalibrationReport) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    recovery = Recovery([0.0] * (WINDOW_STEPS - 1) + [0.1] * 10, 5, 3, 0.95, 0.1, 0.1)
    cost_model_error._plot([("a", found, recovery), ("b", found, recovery)], figure)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["a", "a: 1.5 x slower from the middle on", "b", "b: 1.5 x slower from the middle on"]
    rolling = figure.axes[1].lines[0]
    assert list(rolling.get_ydata()) == [10.0] * 10, "no false 0 where no window is full"
    assert rolling.get_xdata()[0] == WINDOW_STEPS - 1


@pytest.mark.parametrize(("value", "label"), [(0.2, "0.2"), (1.0, "1"), (3.0, ""), (50.0, "50"), (1000.0, "1000")])
def test_ticks_are_plain_numbers(value: float, label: str) -> None:
    assert cost_model_error._plain_tick(value, 0) == label
