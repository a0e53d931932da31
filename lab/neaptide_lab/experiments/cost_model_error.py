"""Errors of the iteration-time models on held-out steps of this machine, and how fast ours follows a slow-down.

Every model is fitted to the same training steps, measured in this process, and judged by the same held-out ones. The
slow-down is artificial: the measured steps are shown to ``OnlineCostModel`` in the order in which they ran, and from
the middle on each takes 1.5 times as long.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import floor, log10
from pathlib import Path
from typing import Any

import msgspec

from neaptide.estimator.calibration.calibrate import FULL, QUICK, CalibrationPace, Measurements
from neaptide.estimator.calibration.micro_runs import shape_of
from neaptide.estimator.calibration.report import LABELS, OURS, CalibrationReport
from neaptide.estimator.calibration.times import CalibrationTimes
from neaptide.estimator.cost.iteration_time import Regime, StepSample, regime_of
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.subject import Subject
from neaptide.launch.calibrating import calibrate_model
from neaptide.server.settings import EMBEDDED_MODEL
from neaptide_lab.experiments.models import model_111m, path_of_111m
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "cost-model-error"
ABOUT = "iteration-time models on held-out steps of this machine (minutes; a quiet machine), recovery from a slow-down"

LARGE_QUICK = CalibrationPace(budget_s=40.0, max_step_s=1.0, max_rounds=5)
LARGE_FULL = CalibrationPace(budget_s=300.0, max_step_s=1.5, max_rounds=10)
"""For the 111M model, whose steps are longer than the embedded one's."""
SLOW_DOWN = 1.5
ERROR_BOUND = 0.08
RECOVERY_STEPS = 100
WINDOW_STEPS = 20
"""Steps whose mean error is the rolling error."""
LEAST_STEPS = 1000
"""Fewer measured ones are shown again from the first on."""
NOMINAL_COVERAGE = 0.95
COVERAGE_TOLERANCE = 0.015
LEAST_SHAPES = 5
"""A mean error over fewer held-out shapes is shown, not judged."""

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Recovery:
    """How the corrected model fares when the machine slows down at half of the steps."""

    rolling_error: list[float]
    """Mean relative error of the last ``WINDOW_STEPS`` predictions, after each step; 0 before there are that many."""
    slow_from: int
    steps: int | None
    """After the slow-down until the rolling error, over slow steps only, is below the bound; None: never."""
    coverage: float
    """Share of all steps that took no longer than predicted plus margin."""
    early_error: float
    """Mean error of the second half of the steps before the slow-down."""
    late_error: float
    """Mean error of the second half of the slow steps."""

    @property
    def is_judged(self) -> bool:
        """Whether the error was within the bound before: else no correction brings it back there."""
        return self.early_error < ERROR_BOUND


def measure_recovery(base: RooflineModel, steps: Sequence[StepSample]) -> Recovery:
    """Shows the steps to an ``OnlineCostModel`` over ``base``, those of the second half ``SLOW_DOWN`` times as long."""
    model = OnlineCostModel(base)
    count = max(len(steps), LEAST_STEPS)
    slow_from = count // 2
    errors: list[float] = []
    for index, step in enumerate(islice(cycle(steps), count)):
        seconds = step.seconds * (SLOW_DOWN if index >= slow_from else 1.0)
        errors.append(abs(model.predict(step.shape).seconds / seconds - 1.0))
        model.observe(step.shape, seconds)
    rolling = [0.0] * (WINDOW_STEPS - 1)
    rolling += [_mean(errors[i : i + WINDOW_STEPS]) for i in range(count - WINDOW_STEPS + 1)]
    first = slow_from + WINDOW_STEPS - 1
    below = (i for i in range(first, count) if rolling[i] < ERROR_BOUND)
    recovered = next(below, None)
    return Recovery(
        rolling,
        slow_from,
        None if recovered is None else recovered - slow_from + 1,
        model.coverage,
        _mean(errors[slow_from // 2 : slow_from]),
        _mean(errors[(slow_from + count) // 2 :]),
    )


def run(quick: bool) -> ExperimentResult:
    paces = {EMBEDDED_MODEL: QUICK if quick else FULL}
    large = model_111m()
    if large is not None:
        paces[str(large)] = LARGE_QUICK if quick else LARGE_FULL
    rows: list[Row] = []
    notes: list[str] = []
    data: dict[str, Any] = {"quick": quick}
    found: list[tuple[str, CalibrationReport, Recovery]] = []
    for model, pace in paces.items():
        log.info("measuring %s, for at most %.0f s", Path(model).name, pace.budget_s)
        report, subject = calibrate_model(model, pace)
        recovery = measure_recovery(report.chosen.ours, recorded(report.measurements))
        found.append((subject.model, report, recovery))
        rows += error_rows(subject.model, report) + recovery_rows(subject.model, recovery)
        notes += _notes(subject, report) + _not_judged(subject.model, report, recovery)
        data[subject.model] = _data(subject, report, recovery)
    notes.append("Echo, BROS and HyGen print no error of their models: the paper column is empty.")
    if len(paces) == 1:
        notes.append(
            f"Not measured, because it is not there: the 111M model. python tools/make_111m.py --out {path_of_111m()}"
        )
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(found, figure))


def recorded(measurements: Measurements) -> list[StepSample]:
    """Every measured step in the order in which it ran, with the time that it took."""
    return [StepSample(shape_of(run.parts), run.seconds) for run in measurements.runs]


def error_rows(model: str, report: CalibrationReport) -> list[Row]:
    """Held-out errors of every model by regime; ours must be the lowest and within its bound, where shapes suffice."""
    chosen = report.chosen
    rows = []
    for regime in chosen.mape[OURS]:
        for name, errors in chosen.mape.items():
            if name != OURS:
                taken = ", taken as the paper's" if name == chosen.echo else ""
                rows.append(_percent(f"{model} {regime}: {LABELS[name]}{taken}", errors[regime]))
        holds: bool | None = chosen.is_lowest(regime) and chosen.is_within_bound(regime)
        noise, bound, shapes = chosen.noise_floor[regime], chosen.bound(regime), held_out_shapes(report, regime)
        case = f"{model} {regime}: ours; noise floor {noise:.1%}, bound {bound:.1%}, {shapes} shapes"
        if shapes < LEAST_SHAPES:
            case, holds = f"{case}: not judged", None
        rows.append(_percent(case, chosen.mape[OURS][regime], holds=holds))
    return rows


def held_out_shapes(report: CalibrationReport, regime: Regime) -> int:
    return sum(regime_of(sample.shape) is regime for sample in report.chosen.held_out)


def recovery_rows(model: str, recovery: Recovery) -> list[Row]:
    """The return below the bound is judged only where the error was below it before; the coverage always."""
    case = f"{model}: steps after a {SLOW_DOWN} x slow-down until the error is < {ERROR_BOUND:.0%}"
    steps, holds = recovery.steps, recovery.steps is not None and recovery.steps <= RECOVERY_STEPS
    if steps is None:
        steps, case = len(recovery.rolling_error) - recovery.slow_from, f"{case} (never in so many)"
    if not recovery.is_judged:
        case = f"{case}: not judged, before it was {recovery.early_error:.1%}"
    recovered = Row(case, steps, digits=0, holds=holds if recovery.is_judged else None)
    off_nominal = abs(recovery.coverage - NOMINAL_COVERAGE)
    return [
        recovered,
        _percent(f"{model}: error late after the slow-down", recovery.late_error),
        _percent(
            f"{model}: coverage of the margin over the whole run, nominal {NOMINAL_COVERAGE:.0%}",
            recovery.coverage,
            holds=off_nominal <= COVERAGE_TOLERANCE,
        ),
    ]


def _percent(case: str, value: float, *, holds: bool | None = None) -> Row:
    return Row(case, 100.0 * value, unit="%", digits=1, holds=holds)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _notes(subject: Subject, report: CalibrationReport) -> list[str]:
    measured, chosen = report.measurements, report.chosen
    counts = f"{len(measured.runs)} steps of {len(chosen.training)} training and {len(chosen.held_out)} held-out shapes"
    notes = [
        f"{subject.model}: {subject.dtype}, {subject.device}, {subject.num_threads} threads; {counts} in "
        f"{measured.seconds:.0f} s; the machine's speed wandered by {measured.drift:.1%}."
    ]
    if report.is_normalised:
        raw = ", ".join(f"{regime} {error:.1%}" for regime, error in report.raw.mape[OURS].items())
        notes.append(f"{subject.model}: times are divided by its speed of the moment; without that ours errs by {raw}.")
    left_out = [f"{count} ({reason})" for reason, count in measured.left_out.items() if count]
    if left_out:
        notes.append(f"{subject.model}: shapes left out: {', '.join(left_out)}.")
    for regime in chosen.mape[OURS]:
        if not chosen.is_lowest(regime):
            best = min(chosen.mape, key=lambda name: chosen.mape[name][regime])
            notes.append(f"{subject.model}: {LABELS[best]} predicts {regime} steps better than ours here.")
    return notes


def _not_judged(model: str, report: CalibrationReport, recovery: Recovery) -> list[str]:
    notes = []
    few = {regime: held_out_shapes(report, regime) for regime in Regime}
    if named := ", ".join(f"{regime} ({shapes})" for regime, shapes in few.items() if shapes < LEAST_SHAPES):
        notes.append(
            f"{model}: not judged for want of held-out shapes, fewer than {LEAST_SHAPES}: {named}. A longer run, or a "
            "machine with nothing else to do, measures more."
        )
    if not recovery.is_judged:
        notes.append(
            f"{model}: the machine was too noisy to judge the recovery: the error was {recovery.early_error:.1%} "
            f"before the slow-down, with {ERROR_BOUND:.0%} as the bound. Repeat it when the machine has nothing else "
            "to do."
        )
    return notes


def _data(subject: Subject, report: CalibrationReport, recovery: Recovery) -> dict[str, Any]:
    measured = report.measurements
    return {
        "device": subject.device,
        "dtype": subject.dtype,
        "num_threads": subject.num_threads,
        "steps": len(measured.runs),
        "seconds": measured.seconds,
        "drift": measured.drift,
        "is_normalised": report.is_normalised,
        "times": msgspec.to_builtins(CalibrationTimes.of(measured)),
        "normalised": {"mape": report.normalised.mape, "noise_floor": report.normalised.noise_floor},
        "raw": {"mape": report.raw.mape, "noise_floor": report.raw.noise_floor},
        "recovery": {
            "steps": recovery.steps,
            "coverage": recovery.coverage,
            "early_error": recovery.early_error,
            "late_error": recovery.late_error,
        },
    }


def _plot(found: Sequence[tuple[str, CalibrationReport, Recovery]], figure: Any) -> None:
    """A row a model: predicted against measured time of held-out steps, and the rolling error around the slow-down."""
    panels = figure.subplots(len(found), 2, squeeze=False)
    for (model, report, recovery), (left, right) in zip(found, panels, strict=True):
        chosen = report.chosen
        measured_ms = [1e3 * sample.seconds for sample in chosen.held_out]
        for name in (chosen.echo, "bros", "hygen", OURS):
            predicted_ms = [1e3 * chosen.models[name].predict(sample.shape).seconds for sample in chosen.held_out]
            left.loglog(measured_ms, predicted_ms, ".", markersize=5 if name == OURS else 3, label=LABELS[name])
        ends = [min(measured_ms), max(measured_ms)]
        left.loglog(ends, ends, color="grey", linewidth=1)
        left.set(title=model, xlabel="measured, ms", ylabel="predicted, ms")
        for axis in (left.xaxis, left.yaxis):
            axis.set_major_formatter(_plain_tick)
            axis.set_minor_formatter(_plain_tick)
        left.legend(fontsize=8)
        first = WINDOW_STEPS - 1  # before it no window is full
        rolling = [100 * error for error in recovery.rolling_error[first:]]
        right.plot(range(first, first + len(rolling)), rolling, linewidth=1)
        right.axvline(recovery.slow_from, color="grey", linestyle=":")
        right.axhline(100 * ERROR_BOUND, color="grey", linewidth=1)
        right.set(
            title=f"{model}: {SLOW_DOWN} x slower from the middle on",
            xlabel="step",
            ylabel=f"error of {WINDOW_STEPS} steps, %",
        )


def _plain_tick(value: float, _position: int) -> str:
    """1, 2 and 5 times a power of ten, as plain numbers; the ticks between stay without a label."""
    leading = round(value / 10 ** floor(log10(value)), 6)
    return f"{value:g}" if leading in (1, 2, 5) else ""
