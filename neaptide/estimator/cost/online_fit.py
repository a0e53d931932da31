"""Our iteration-time model, corrected by every step that was measured."""

from math import exp, expm1, inf, log, sqrt

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide.engine.interfaces import Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.conformal import AdaptiveQuantile
from neaptide.estimator.cost.iteration_time import Regime, regime_of
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import NUM_TERMS

# The parameters, all logarithms: those of each regime, one per term, then one that is common to everything.
OWN = {regime: slice(NUM_TERMS * index, NUM_TERMS * (index + 1)) for index, regime in enumerate(Regime)}
COMMON = NUM_TERMS * len(Regime)
SIZE = COMMON + 1

# All of these are about relative errors, which are differences of logarithms.
NOISE = 0.05
"""Expected of a single step."""
PRIOR_COMMON = 1.0
"""How far off the base may be as a whole ..."""
PRIOR_TERM = 0.3
"""... one of its terms against the whole ..."""
PRIOR_OWN = 0.2
"""... and that term in one regime against the others."""
MEMORY_STEPS = 2000
"""A term's own factor goes back to 1 so slowly where no step tells otherwise; also how fast it may drift."""
OWN_DECAY = 1.0 - 1.0 / MEMORY_STEPS
COMMON_DRIFT = 0.0025
"""Of the common factor, each step."""
TREND_RATE, TREND_DRIFT = 0.2, 0.3
"""The mean of the last few errors adds to the drift: errors of one sign say that the machine has changed."""
OUTLIER = 3.0
"""Errors count for at most so many standard deviations: one stalled step is not a slow machine."""
MAX_TREND_ERROR = 0.3
FIRST_MARGIN = 0.1
"""Until a regime has shown enough steps for a quantile."""
MAX_MARGIN = log(1.3)
"""On a machine noisier than that a wider margin would only stop offline work: what stalls a step from outside stalls a
short one as long."""


def prior_covariance() -> FloatArray:
    """[SIZE, SIZE]: a term's parameters in two regimes have the error of the term in common."""
    of_term = PRIOR_TERM**2 + PRIOR_OWN**2 * np.eye(len(Regime))
    covariance = np.zeros((SIZE, SIZE))
    covariance[:COMMON, :COMMON] = np.kron(of_term, np.eye(NUM_TERMS))
    covariance[COMMON, COMMON] = PRIOR_COMMON**2
    return covariance


class OnlineCostModel:
    """Implements ``CostModel``: the base's terms, each times a factor that is learnt.

    The logarithm of a term's factor is a common part plus the term's own part in the step's regime, so that a machine
    that slows down is noticed from any kind of step, also for kinds not seen since. An extended Kalman filter learns
    them from the logarithm of measured over predicted time, that is recursive least squares on the relative error in
    which every parameter has its own forgetting; a term's own part is pulled back to 0. Factors are positive: where a
    step's terms all grow it never takes less time. With overlap a term may shrink as another grows, and then factors
    that differ can make a step with more work shorter by a hair (0.1% was seen).

    The margin is a quantile of the regime's recent relative errors by adaptive conformal inference
    (``AdaptiveQuantile``): one regime may be noisier than another, and each is covered as promised.
    State depends on nothing but the base and the steps observed, in order.

    Args:
        base: tells what a step's time is made of; it is not changed.
        alpha: the share of steps that may take longer than predicted plus margin.
    """

    def __init__(self, base: RooflineModel, alpha: float = 0.05) -> None:
        self.base = base
        self._logs = [0.0] * SIZE
        """What every regime's terms have beside the common part, and that."""
        decay = np.full(SIZE, OWN_DECAY)
        decay[COMMON] = 1.0
        self._covariance = prior_covariance()
        self._covariance_decay = np.outer(decay, decay)
        # As much as the decay takes, so that what no step tells of keeps its prior.
        self._growth = (1.0 - self._covariance_decay) * self._covariance
        self._factors = {regime: [1.0] * NUM_TERMS for regime in Regime}
        self._trend = 0.0
        self._quantiles = {regime: AdaptiveQuantile(alpha, initial=FIRST_MARGIN) for regime in Regime}
        self._relative_margins = dict.fromkeys(Regime, expm1(FIRST_MARGIN))
        self._num_observed = 0
        self._num_covered = 0
        self._sum_errors = 0.0

    @property
    def coverage(self) -> float:
        """Share of the observed steps that took no longer than predicted plus margin; 1 before the first."""
        return self._num_covered / self._num_observed if self._num_observed else 1.0

    @property
    def mape(self) -> float:
        """Mean relative error of the predictions as they stood before each step; 0 before the first."""
        return self._sum_errors / self._num_observed if self._num_observed else 0.0

    def as_it_is(self) -> RooflineModel:
        """What it has learnt by now, as a model that learns no more."""
        factors = {regime: (a, b, c, d, e, f) for regime, (a, b, c, d, e, f) in self._factors.items()}
        costs = {regime: cost.scaled(factors[regime]) for regime, cost in self.base.costs.items()}
        return RooflineModel(costs, self.base.overlap_kappa, self.base.tile_tokens)

    def predict(self, shape: BatchShape) -> Prediction:
        regime = regime_of(shape)
        fixed, gemm, attention, kv, requests, swap = self.base.formulas[regime].terms(shape)
        a, b, c, d, e, f = self._factors[regime]
        seconds = a * fixed + b * gemm + c * attention + d * kv + e * requests + f * swap
        return Prediction(seconds, seconds * self._relative_margins[regime])

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """A time that is not positive and finite is ignored: it would never be forgotten."""
        regime = regime_of(shape)
        terms, factors = self.base.formulas[regime].terms(shape), self._factors[regime]
        a, b, c, d, e, f = parts = [factor * term for factor, term in zip(factors, terms, strict=True)]
        predicted_s = a + b + c + d + e + f
        margin_s = predicted_s * self._relative_margins[regime]
        if not (0.0 < seconds < inf and 0.0 < predicted_s < inf):
            return
        covered = seconds <= predicted_s + margin_s
        self._num_observed += 1
        self._num_covered += covered
        self._sum_errors += abs(predicted_s / seconds - 1.0)
        error = log(seconds / predicted_s)
        quantile = self._quantiles[regime]
        quantile.observe(error, not covered)
        self._relative_margins[regime] = expm1(min(max(quantile.value, 0.0), MAX_MARGIN))
        self._learn(regime, [part / predicted_s for part in parts], error)

    def _learn(self, regime: Regime, shares: list[float], error: float) -> None:
        """One step of the filter.

        Args:
            shares: of the predicted time, that its terms have.
            error: the logarithm of measured over predicted time.
        """
        # The prediction's logarithm changes with the common part by 1, with a term's by that term's share of it.
        slope, own = np.zeros(SIZE), OWN[regime]
        slope[own], slope[COMMON] = shares, 1.0

        self._trend += TREND_RATE * (min(max(error, -MAX_TREND_ERROR), MAX_TREND_ERROR) - self._trend)
        self._growth[COMMON, COMMON] = COMMON_DRIFT**2 + (TREND_DRIFT * self._trend) ** 2
        covariance = self._covariance
        covariance *= self._covariance_decay
        covariance += self._growth

        # No matrix product here: elementwise sums give the same bits on every machine.
        along = np.add.reduce(covariance * slope, axis=1)
        covariances: list[float] = along.tolist()
        variance = covariances[COMMON] + NOISE**2
        for share, of_term in zip(shares, covariances[own], strict=True):
            variance += share * of_term
        limit = OUTLIER * sqrt(variance)
        gain = min(max(error, -limit), limit) / variance
        along /= sqrt(variance)
        covariance -= along[:, np.newaxis] * along
        common = self._logs[COMMON] + gain * covariances[COMMON]
        self._logs = logs = [OWN_DECAY * log + gain * each for log, each in zip(self._logs, covariances, strict=True)]
        logs[COMMON] = common
        factors = [exp(common + beside) for beside in logs[:COMMON]]
        self._factors = {regime: factors[own] for regime, own in OWN.items()}
