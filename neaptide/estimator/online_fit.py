"""Our iteration-time model, corrected by every step that was measured."""

from math import exp, log, sqrt

import numpy as np

from neaptide.engine.batch import BatchShape
from neaptide.engine.interfaces import Prediction
from neaptide.estimator.conformal import AdaptiveQuantile
from neaptide.estimator.iteration_time import Regime, regime_of
from neaptide.estimator.roofline import RooflineModel

NUM_TERMS = 6
OFFSETS = {regime: 1 + NUM_TERMS * index for index, regime in enumerate(Regime)}
SIZE = 1 + NUM_TERMS * len(Regime)

NOISE = 0.05
"""Of one step, relative."""
DRIFT_GAIN = 0.1
"""Share of a step's error that goes into the common factor."""
MEMORY_STEPS = 2000
"""So slowly a term's own factor goes back to the common one where nothing is measured."""
PRIOR_LEVEL = 1.0
PRIOR_TERM = 0.3
OUTLIER = 3.0


class OnlineCostModel:
    """Implements ``CostModel``: the base's terms, each times a factor that is learnt.

    Args:
        base: tells what a step's time is made of; it is not changed.
        alpha: the share of steps that may take longer than predicted plus margin.
    """

    def __init__(self, base: RooflineModel, alpha: float = 0.05) -> None:
        self._base = base
        self._logs = np.zeros(SIZE)
        self._covariance = np.diag(np.full(SIZE, PRIOR_TERM**2))
        self._covariance[0, 0] = PRIOR_LEVEL**2
        decay = 1.0 - 1.0 / MEMORY_STEPS
        self._decay = np.full(SIZE, decay)
        self._decay[0] = 1.0
        self._growth = np.full(SIZE, (1.0 - decay**2) * PRIOR_TERM**2)
        self._growth[0] = (DRIFT_GAIN * NOISE) ** 2
        self._factors = {regime: [1.0] * NUM_TERMS for regime in Regime}
        self._quantile = AdaptiveQuantile(alpha)
        self._scale = 0.1
        """Of recent relative errors."""
        self._num_observed = 0
        self._num_covered = 0
        self._sum_errors = 0.0

    @property
    def coverage(self) -> float:
        """Share of the observed steps that took no longer than predicted plus margin; 1 before the first."""
        return self._num_covered / self._num_observed if self._num_observed else 1.0

    @property
    def mape(self) -> float:
        """Mean relative error of the predictions at the time they were made; 0 before the first."""
        return self._sum_errors / self._num_observed if self._num_observed else 0.0

    def predict(self, shape: BatchShape) -> Prediction:
        a, b, c, d, e, f = self._base.terms(shape)
        fa, fb, fc, fd, fe, ff = self._factors[regime_of(shape)]
        seconds = fa * a + fb * b + fc * c + fd * d + fe * e + ff * f
        return Prediction(seconds, seconds * self._relative_margin)

    @property
    def _relative_margin(self) -> float:
        return max(exp(self._quantile.value * self._scale) - 1.0, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        predicted_s, margin_s = self.predict(shape)
        if seconds <= 0.0 or predicted_s <= 0.0:
            return
        covered = seconds <= predicted_s + margin_s
        error = log(seconds / predicted_s)
        self._num_observed += 1
        self._num_covered += covered
        self._sum_errors += abs(predicted_s / seconds - 1.0)
        self._quantile.observe(error / self._scale, not covered)
        self._scale = max(self._scale + 0.05 * (abs(error) - self._scale), 1e-3)
        self._learn(shape, predicted_s, error)

    def _learn(self, shape: BatchShape, predicted_s: float, error: float) -> None:
        """One step of an extended Kalman filter over the logarithms of the factors."""
        regime = regime_of(shape)
        offset = OFFSETS[regime]
        slope = np.zeros(SIZE)
        slope[0] = 1.0
        parts = zip(self._factors[regime], self._base.terms(shape), strict=True)
        slope[offset : offset + NUM_TERMS] = [factor * term / predicted_s for factor, term in parts]
        self._logs *= self._decay
        covariance = self._covariance * self._decay * self._decay[:, None]
        covariance[np.diag_indices(SIZE)] += self._growth
        along = (covariance * slope).sum(axis=1)
        variance = float((along * slope).sum()) + NOISE**2
        limit = OUTLIER * sqrt(variance)
        self._logs += along * (min(max(error, -limit), limit) / variance)
        self._covariance = covariance - along[:, None] * along / variance
        level = float(self._logs[0])
        for regime, start in OFFSETS.items():
            self._factors[regime] = [exp(level + x) for x in self._logs[start : start + NUM_TERMS].tolist()]
