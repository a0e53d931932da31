"""A calibration's report: our fitted model, and every model's error on held-out steps."""

from dataclasses import dataclass
from itertools import combinations
from math import log, sqrt
from statistics import median, median_low

import msgspec

from neaptide.engine.interfaces import CostModel
from neaptide.estimator.calibration.calibrate import Measurements
from neaptide.estimator.calibration.micro_runs import shape_of
from neaptide.estimator.cost.iteration_time import Regime, StepSample, mean_relative_error, regime_of
from neaptide.estimator.cost.paper_models import BrosModel, EchoModel, HygenModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import DeviceProfile, Measurement
from neaptide.estimator.subject import Subject

OURS = "ours"
LABELS = {"echo_max": "Echo, c as floor", "echo_sum": "Echo, c added", "bros": "BROS", "hygen": "HyGen", OURS: "ours"}
"""Names of the models in tables."""
ECHO_READINGS = ("echo_max", "echo_sum")
"""Two readings of Echo's constant: as a floor, and as a summand."""
LEAST_BOUND = 0.05
NOISE_FACTOR = 1.5
VISIBLE_DRIFT = 0.05
WINDOWS = (1, 3, 7, 15)
"""Candidate numbers of reference runs for the machine's current speed. Fewer runs show a change sooner; more runs add
less noise."""

ByRegime = dict[Regime, float]


@dataclass(slots=True, frozen=True)
class Evaluation:
    """The models, fitted to the training steps and judged on the held-out ones."""

    models: dict[str, CostModel]
    ours: RooflineModel
    training: list[StepSample]
    held_out: list[StepSample]
    mape: dict[str, ByRegime]
    """Model -> regime -> mean relative error on held-out steps; regimes without such steps are missing."""
    grid_mape: dict[str, ByRegime]
    """``mape`` on steps of the grid only."""
    ragged_mape: dict[str, ByRegime]
    """``mape`` on ragged steps only."""
    noise_floor: ByRegime
    """Result of ``noise_floor()``."""
    repeats: dict[Regime, int]
    """Median number of repeats that the noise floor rests on; 0 if it is unknown."""

    @property
    def echo(self) -> str:
        """The better-fitting reading of Echo's constant, reported as the paper's model."""
        return min(ECHO_READINGS, key=lambda name: sum(self.mape[name].values()))

    def bound(self, regime: Regime) -> float:
        """Largest acceptable error of our model. An unknown noise floor of 0 does not widen it."""
        return max(LEAST_BOUND, NOISE_FACTOR * self.noise_floor[regime])

    def is_within_bound(self, regime: Regime) -> bool:
        return self.mape[OURS][regime] <= self.bound(regime)

    def is_lowest(self, regime: Regime) -> bool:
        """Whether our model's error is at most that of every other model."""
        return all(errors[regime] >= self.mape[OURS][regime] for errors in self.mape.values())


@dataclass(slots=True, frozen=True)
class CalibrationReport:
    measurements: Measurements
    raw: Evaluation
    """Evaluation of the raw times."""
    normalised: Evaluation
    """Evaluation of the times divided by the machine's speed at that moment."""

    @property
    def is_normalised(self) -> bool:
        """Whether the machine's speed drifted visibly, and dividing by it makes repeats agree better."""
        return self.measurements.drift > VISIBLE_DRIFT and _total(self.normalised.noise_floor) < _total(
            self.raw.noise_floor
        )

    @property
    def chosen(self) -> Evaluation:
        return self.normalised if self.is_normalised else self.raw

    def profile(self, subject: Subject, name: str, date: str, commit: str) -> DeviceProfile:
        """A profile with our model's coefficients and all errors."""
        measured, chosen = self.measurements, self.chosen
        return msgspec.structs.replace(
            subject.profile(name, date, chosen.ours.costs, commit),
            noise_floor=_plain(chosen.noise_floor),
            held_out_mape=_plain_models(chosen.mape),
            measurement=Measurement(
                num_threads=subject.num_threads,
                num_shapes=len(measured.by_step()),
                num_steps=len(measured.runs),
                left_out={reason: count for reason, count in measured.left_out.items() if count},
                drift=round(measured.drift, 4),
                is_normalised=self.is_normalised,
                repeats={regime.value: count for regime, count in chosen.repeats.items()},
                grid_mape=_plain_models(chosen.grid_mape),
                ragged_mape=_plain_models(chosen.ragged_mape),
                raw_noise_floor=_plain(self.raw.noise_floor),
                raw_held_out_mape=_plain_models(self.raw.mape),
            ),
        )


def _total(by_regime: ByRegime) -> float:
    return sum(by_regime.values())


def _plain(by_regime: ByRegime) -> dict[str, float]:
    return {regime.value: round(value, 4) for regime, value in by_regime.items()}


def _plain_models(by_model: dict[str, ByRegime]) -> dict[str, dict[str, float]]:
    return {model: _plain(errors) for model, errors in by_model.items()}


def report(measurements: Measurements) -> CalibrationReport:
    """Fits and judges all models, on raw times and on the normalised times whose repeats agree best.

    Raises:
        ValueError: there are no training steps.
    """
    normalised = min(map(measurements.normalised, WINDOWS), key=lambda m: _total(noise_floor(m)))
    return CalibrationReport(measurements, evaluate(measurements), evaluate(normalised))


def evaluate(measurements: Measurements) -> Evaluation:
    """Fits all models to the training steps and judges them on the held-out ones.

    Raises:
        ValueError: there are no training steps.
    """
    training, held_out = (measurements.samples(held_out=held_out) for held_out in (False, True))
    ours, bros, hygen = RooflineModel(), BrosModel(), HygenModel()
    echo_max, echo_sum = EchoModel("max"), EchoModel("sum")
    ours.fit(training)
    known_to_papers = [sample for sample in training if not sample.shape.shared_prefix_tokens]
    for model in (echo_max, echo_sum, bros, hygen):
        model.fit(known_to_papers)
    models: dict[str, CostModel] = {
        ECHO_READINGS[0]: echo_max,
        ECHO_READINGS[1]: echo_sum,
        "bros": bros,
        "hygen": hygen,
        OURS: ours,
    }
    grid, ragged = (measurements.samples(held_out=True, of_grid=of_grid) for of_grid in (True, False))
    return Evaluation(
        models,
        ours,
        training,
        held_out,
        mape=_judge(models, held_out),
        grid_mape=_judge(models, grid),
        ragged_mape=_judge(models, ragged),
        noise_floor=noise_floor(measurements),
        repeats=repeats_of(measurements),
    )


def _judge(models: dict[str, CostModel], samples: list[StepSample]) -> dict[str, ByRegime]:
    judged = {regime: [s for s in samples if regime_of(s.shape) is regime] for regime in Regime}
    return {
        name: {regime: mean_relative_error(model, judged[regime]) for regime in Regime if judged[regime]}
        for name, model in models.items()
    }


def noise_floor(measurements: Measurements) -> ByRegime:
    """Per regime, the median relative deviation of a single time from the true one; 0 if no step ran twice.

    It comes from pairs of repeats of a step: median |log(a / b)| / sqrt 2. Deviations from the median of few repeats
    would be too small, because one of three repeats is that median.
    """
    differences: dict[Regime, list[float]] = {regime: [] for regime in Regime}
    for parts, times in measurements.by_step().items():
        differences[regime_of(shape_of(parts))] += [abs(log(a / b)) for a, b in combinations(times, 2)]
    return {regime: median(found) / sqrt(2.0) if found else 0.0 for regime, found in differences.items()}


def repeats_of(measurements: Measurements) -> dict[Regime, int]:
    """Per regime, the median number of runs of steps that ran more than once; 0 if there are none."""
    counts: dict[Regime, list[int]] = {regime: [] for regime in Regime}
    for parts, times in measurements.by_step().items():
        if len(times) > 1:
            counts[regime_of(shape_of(parts))].append(len(times))
    return {regime: median_low(found) if found else 0 for regime, found in counts.items()}
