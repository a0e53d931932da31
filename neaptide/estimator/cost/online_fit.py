"""Our iteration-time model, corrected by every measured step."""

from math import exp, expm1, inf, log, sqrt

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide.engine.interfaces import Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.conformal import AdaptiveQuantile
from neaptide.estimator.cost.iteration_time import Regime, regime_of
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import NUM_TERMS

# The parameters are logarithms: one per term for each regime, then one common to all.
OWN = {regime: slice(NUM_TERMS * index, NUM_TERMS * (index + 1)) for index, regime in enumerate(Regime)}
COMMON = NUM_TERMS * len(Regime)
SIZE = COMMON + 1

# Relative errors are differences of logarithms.
NOISE = 0.05
"""Standard deviation expected for a single step."""
PRIOR_COMMON = 1.0
"""Prior deviation of the base as a whole."""
PRIOR_TERM = 0.3
"""Prior deviation of a term relative to the whole."""
PRIOR_OWN = 0.2
"""Prior deviation of a term in one regime relative to the others."""
MEMORY_STEPS = 2000
"""Steps over which a term's own factor decays towards 1 without new evidence. It also limits the factor's drift."""
OWN_DECAY = 1.0 - 1.0 / MEMORY_STEPS
COMMON_DRIFT = 0.0025
"""Drift of the common factor per step."""
TREND_RATE, TREND_DRIFT = 0.2, 0.3
"""Weight of the newest error in the trend, and the trend's contribution to the drift. Errors of one sign mean that the
machine has changed."""
OUTLIER = 3.0
"""Errors are clipped to this many standard deviations: one stalled step does not mean a slow machine."""
MAX_TREND_ERROR = 0.3
FIRST_MARGIN = 0.1
"""Margin until a regime has enough steps for a quantile."""
MAX_MARGIN = log(1.3)
"""Limit of the margin. On a noisier machine a wider margin would only stop offline work: an external stall delays a
short step as much as a long one."""


def prior_covariance() -> FloatArray:
    """The prior covariance [SIZE, SIZE]. A term's parameters in different regimes share the term's error."""
    of_term = PRIOR_TERM**2 + PRIOR_OWN**2 * np.eye(len(Regime))
    covariance = np.zeros((SIZE, SIZE))
    covariance[:COMMON, :COMMON] = np.kron(of_term, np.eye(NUM_TERMS))
    covariance[COMMON, COMMON] = PRIOR_COMMON**2
    return covariance


class OnlineCostModel:
    """Implements ``CostModel``: each term of the base times a learned factor.

    The logarithm of a factor is a common part plus the term's own part in the step's regime. So a slower machine shows
    in any kind of step, also for kinds not seen since. An extended Kalman filter learns the parts from the log of
    measured over predicted time. This is recursive least squares on the relative error with a forgetting rate per
    parameter. A term's own part decays to 0. Factors are positive, so a step in which all terms grow never takes less
    time. With overlap a term may shrink while another grows. Unequal factors can then make a step with more work
    slightly shorter (0.1% was seen).

    The margin is a quantile of the regime's recent relative errors by adaptive conformal inference
    (``AdaptiveQuantile``). Each regime has its own noise and its own coverage.

    The state depends only on the base and the observed steps, in order.

    Args:
        base: the model whose terms are corrected; it is not changed.
        alpha: fraction of steps that may take longer than predicted plus margin.
    """

    def __init__(self, base: RooflineModel, alpha: float = 0.05) -> None:
        self.base = base
        self._logs = [0.0] * SIZE
        """Each term's own part by regime, and the common part."""
        decay = np.full(SIZE, OWN_DECAY)
        decay[COMMON] = 1.0
        self._covariance = prior_covariance()
        self._covariance_decay = np.outer(decay, decay)
        # Equals the loss by decay, so that unobserved parameters keep their prior.
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
        """Fraction of observed steps that took at most the prediction plus margin; 1 before the first."""
        return self._num_covered / self._num_observed if self._num_observed else 1.0

    @property
    def mape(self) -> float:
        """Mean relative error of the predictions made before each step; 0 before the first."""
        return self._sum_errors / self._num_observed if self._num_observed else 0.0

    def as_it_is(self) -> RooflineModel:
        """A copy with what has been learned, which learns no more."""
        factors = {regime: (a, b, c, d, e, f) for regime, (a, b, c, d, e, f) in self._factors.items()}
        costs = {regime: cost.scaled(factors[regime]) for regime, cost in self.base.costs.items()}
        base = self.base
        return RooflineModel(costs, base.overlap_kappa, base.tile_tokens, base.overlaps_copies)

    def predict(self, shape: BatchShape) -> Prediction:
        regime = regime_of(shape)
        fixed, gemm, attention, kv, requests, swap = self.base.formulas[regime].terms(shape)
        a, b, c, d, e, f = self._factors[regime]
        seconds = a * fixed + b * gemm + c * attention + d * kv + e * requests + f * swap
        return Prediction(seconds, seconds * self._relative_margins[regime])

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learns from a measured step. A time that is not positive and finite is ignored: its effect would
        never fade."""
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
            shares: each term's fraction of the predicted time.
            error: log of measured over predicted time.
        """
        # The log of the prediction changes by 1 with the common part, and by a term's share with that term's part.
        slope, own = np.zeros(SIZE), OWN[regime]
        slope[own], slope[COMMON] = shares, 1.0

        self._trend += TREND_RATE * (min(max(error, -MAX_TREND_ERROR), MAX_TREND_ERROR) - self._trend)
        self._growth[COMMON, COMMON] = COMMON_DRIFT**2 + (TREND_DRIFT * self._trend) ** 2
        covariance = self._covariance
        covariance *= self._covariance_decay
        covariance += self._growth

        # No matrix product: elementwise sums give the same bits on every machine.
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
