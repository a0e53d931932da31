"""Calibration: timed steps in random order within a time budget.

A survey runs every step once, which warms up and shows which steps take too long. Then all steps run in rounds, each in
a new random order, until the time is over. A reference step in between shows how the machine's speed drifts.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median, median_low

import numpy as np

from neaptide.engine.clock import Clock
from neaptide.estimator.calibration.micro_runs import MicroRunner, Parts, shape_of
from neaptide.estimator.calibration.steps import REFERENCE, CalibrationLimits, calibration_steps, start_steps
from neaptide.estimator.cost.iteration_time import Regime, StepSample, regime_of
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel

SURVEY_SHARE = 0.25
"""Fraction of the time budget for the survey. Only steps that it reaches are measured."""
REFERENCE_EVERY = 4
"""Steps between two runs of the reference step."""
ROLLING = 7
"""Number of reference runs whose median is the machine's current speed, by default."""
TOO_LONG = "would take too long"
NO_TIME = "no time was left"
NO_ROOM = "does not fit into the KV cache"


@dataclass(slots=True, frozen=True)
class CalibrationPace:
    """Time limits of a calibration."""

    budget_s: float
    max_step_s: float
    """Steps predicted to take longer are skipped."""
    max_rounds: int


FULL = CalibrationPace(budget_s=120.0, max_step_s=1.0, max_rounds=15)
QUICK = CalibrationPace(budget_s=20.0, max_step_s=0.5, max_rounds=9)


@dataclass(slots=True, frozen=True)
class MeasuredRun:
    parts: Parts
    seconds: float
    at: int
    """Index of the next run of the reference step."""


@dataclass(slots=True)
class Measurements:
    """All timed runs in order, without the survey."""

    held_out: frozenset[Parts]
    grid: frozenset[Parts]
    """Steps of the grid, which are not ragged."""
    runs: list[MeasuredRun] = field(default_factory=list)
    reference_s: list[float] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason for skipping steps -> number of steps."""
    seconds: float = 0.0
    """Duration of the whole calibration."""

    def rolling_reference_s(self, window: int = ROLLING) -> list[float]:
        """For each reference run, the median of ``window`` runs around it."""
        half = window // 2
        times = self.reference_s
        return [median(times[max(i - half, 0) : i + half + 1]) for i in range(len(times))]

    @property
    def drift(self) -> float:
        """Speed drift: (q90 - q10) / median of the rolling reference time."""
        low, middle, high = np.quantile(self.rolling_reference_s(), (0.1, 0.5, 0.9))
        return float((high - low) / middle)

    def normalised(self, window: int = ROLLING) -> "Measurements":
        """The measurements with every time divided by the machine's speed at that moment, relative to its median."""
        rolling = self.rolling_reference_s(window)
        middle = median(rolling)
        runs = []
        for run in self.runs:
            around_s = (rolling[run.at - 1] + rolling[run.at]) / 2
            runs.append(MeasuredRun(run.parts, run.seconds * middle / around_s, run.at))
        return replace(self, runs=runs)

    def by_step(self) -> dict[Parts, list[float]]:
        times: dict[Parts, list[float]] = defaultdict(list)
        for run in self.runs:
            times[run.parts].append(run.seconds)
        return dict(times)

    def samples(self, *, held_out: bool, of_grid: bool | None = None) -> list[StepSample]:
        """Each step at its median time. ``of_grid`` selects steps of the grid (True) or ragged ones (False); None
        selects both.

        With an even number of runs the lower of the two middle times counts, because disturbances only make steps
        longer.
        """
        return [
            StepSample(shape_of(parts), median_low(times))
            for parts, times in self.by_step().items()
            if (parts in self.held_out) == held_out and of_grid in (None, parts in self.grid)
        ]


class Calibration:
    """One calibration.

    Args:
        runner: over an idle executor whose KV blocks have been written to. Untouched memory reads faster than any
            other.
        progress: called with the completed fraction.
    """

    def __init__(
        self,
        runner: MicroRunner,
        clock: Clock,
        limits: CalibrationLimits,
        pace: CalibrationPace,
        seed: int = 0,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._limits = limits
        self._pace = pace
        self._rng = random.Random(seed)
        self._steps = calibration_steps(limits, seed)
        self._progress = progress
        self._guess = OnlineCostModel(RooflineModel.generic())
        self._start_s = clock.now()

    def measure(self) -> Measurements:
        """Measures the steps.

        Raises:
            ValueError: there was no time for a single step.
        """
        self._start_s = self._clock.now()
        measured = Measurements(frozenset(self._steps.held_out), self._steps.grid)
        for parts in start_steps(self._limits):
            if self._guess.predict(shape_of(parts)).seconds <= self._pace.max_step_s:
                self._run(parts)
        surveyed = self._survey(measured)
        for _ in range(self._pace.max_rounds):
            if not self._round(surveyed, measured):
                break
        missing = len(surveyed) - len(measured.by_step())
        if missing == len(surveyed):
            raise ValueError(f"{self._pace.budget_s:g} s are too short for a calibration: allow more time")
        measured.left_out[NO_TIME] += missing
        measured.reference_s.append(self._run(REFERENCE))
        measured.seconds = self._elapsed_s
        self._progress(1.0)
        return measured

    @property
    def _elapsed_s(self) -> float:
        return self._clock.now() - self._start_s

    def _run(self, parts: Parts) -> float:
        # Clocks are no finer than nanoseconds, and rounded times make a short and exact file.
        seconds = round(self._runner.run(parts), 9)
        self._guess.observe(shape_of(parts), seconds)
        return seconds

    def _survey(self, measured: Measurements) -> list[Parts]:
        """Runs every step once. Returns those that can be measured."""
        surveyed = []
        for parts in self._survey_order():
            if not self._runner.fits(parts):
                measured.left_out[NO_ROOM] += 1
            elif self._guess.predict(shape_of(parts)).seconds > self._pace.max_step_s:
                measured.left_out[TOO_LONG] += 1
            elif self._elapsed_s > SURVEY_SHARE * self._pace.budget_s:
                measured.left_out[NO_TIME] += 1
            else:
                self._run(parts)
                surveyed.append(parts)
                self._report(0.0)
        return surveyed

    def _survey_order(self) -> list[Parts]:
        """Random order with cheap steps early and regimes in turn, so that a slow machine measures many steps of each
        kind."""
        ranked = []
        for steps, each_turn in ((self._steps.training, 2), (self._steps.held_out, 1)):
            for regime in Regime:
                kind = [parts for parts in steps if regime_of(shape_of(parts)) is regime]
                cost = {parts: self._rng.random() * self._guess.predict(shape_of(parts)).seconds for parts in kind}
                kind.sort(key=cost.__getitem__)
                ranked += [(index // each_turn, parts) for index, parts in enumerate(kind)]
        return [parts for _, parts in sorted(ranked)]

    def _round(self, steps: list[Parts], measured: Measurements) -> bool:
        """Measures every step once. Returns False if the time ran out."""
        for index, parts in enumerate(self._rng.sample(steps, len(steps))):
            if index % REFERENCE_EVERY == 0:
                measured.reference_s.append(self._run(REFERENCE))
            if self._elapsed_s + self._guess.predict(shape_of(parts)).seconds > self._pace.budget_s:
                return False
            measured.runs.append(MeasuredRun(parts, self._run(parts), len(measured.reference_s)))
            self._report(len(measured.runs) / (len(steps) * self._pace.max_rounds))
        return True

    def _report(self, share_of_rounds: float) -> None:
        self._progress(max(self._elapsed_s / self._pace.budget_s, share_of_rounds))
