"""Fits the coefficients of ``RooflineModel`` to measured steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime, StepSample, raggedness, read_kv_tokens, regime_of
from neaptide.estimator.cost.least_squares import Array, fit_relative
from neaptide.estimator.cost.step_cost import StepCost, gemm_knot, gemm_segment

SHRINKAGES = (20.0, 2.0, 0.2)
"""Candidate pulls of a regime's coefficients towards the common ones, in samples. Cross-validation picks one."""
FOLDS = 3
LEAST_PER_FOLD = 8
"""Samples per fold that cross-validation needs; with fewer, the strongest pull is used."""
SMOOTHNESS = 0.1
"""Pull between neighbouring slopes of the matrix product curve, in samples, up to ``TILE_TOKENS``."""
TILE_TOKENS = 16
"""Above this, the pull grows with the tokens: a kernel's steps are as large as its tiles."""


def fit_costs(samples: Sequence[StepSample]) -> dict[Regime, StepCost]:
    """Coefficients per regime with the least relative error.

    First one set is fitted to all samples. Then each regime's set departs from it as far as the regime's samples
    demand.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("a model cannot be fitted without samples")
    num_segments = max(2, gemm_segment(max(s.shape.num_tokens for s in samples)) + 1)
    shares_reads = any(sample.shape.shared_prefix_tokens for sample in samples)
    features = np.array([_features(sample.shape, num_segments, shares_reads) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    smooth = _smoothness(features, seconds, num_segments)
    common = fit_relative(features, seconds, smooth, np.zeros(len(smooth)))
    # Changes of a coefficient are weighted by their effect on the predictions.
    effect = ((features / seconds[:, None]) ** 2).mean(axis=0)
    prior = _Prior(smooth, effect, common)
    costs = {}
    for regime in Regime:
        chosen = np.array([regime_of(sample.shape) is regime for sample in samples])
        fitted = prior.fit(features[chosen], seconds[chosen]) if chosen.any() else common
        costs[regime] = _cost(fitted.tolist(), num_segments)
    return costs


@dataclass(slots=True, frozen=True)
class _Prior:
    """What a regime's coefficients are pulled towards."""

    smooth: Array
    """Rows that are zero for a straight curve."""
    effect: Array
    """Effect of each coefficient on the predictions."""
    common: Array
    """Coefficients of all regimes together."""

    def fit(self, features: Array, seconds: Array) -> Array:
        """Coefficients of one regime, with the pull that best predicts left-out samples."""
        if len(seconds) < FOLDS * LEAST_PER_FOLD:
            return self._fit(features, seconds, SHRINKAGES[0])
        return self._fit(features, seconds, min(SHRINKAGES, key=lambda s: self._left_out_error(features, seconds, s)))

    def _fit(self, features: Array, seconds: Array, shrinkage: float) -> Array:
        pull = np.diag(np.sqrt(shrinkage * self.effect))
        target = np.concatenate([np.zeros(len(self.smooth)), pull @ self.common])
        return fit_relative(features, seconds, np.concatenate([self.smooth, pull]), target)

    def _left_out_error(self, features: Array, seconds: Array, shrinkage: float) -> float:
        fold = np.arange(len(seconds)) % FOLDS
        errors = [
            np.abs(
                features[fold == k] @ self._fit(features[fold != k], seconds[fold != k], shrinkage) / seconds[fold == k]
                - 1
            )
            for k in range(FOLDS)
        ]
        return float(np.concatenate(errors).mean())


def _features(shape: BatchShape, num_segments: int, shares_reads: bool) -> list[float]:
    """The features that the coefficients multiply, in the order of ``_cost``. Without ``shares_reads`` no step shares
    reads, and the last one is left out."""
    starts = [gemm_knot(k) for k in range(num_segments + 1)]
    curve = [max(shape.num_tokens - start, 0) / (end - start) for start, end in pairwise(starts)]
    curve[:-1] = [min(share, 1.0) for share in curve[:-1]]
    return [
        1.0,
        *curve,
        float(shape.prefill_attention_pairs),
        float(shape.prefill_masked_pairs),
        float(read_kv_tokens(shape)),
        raggedness(shape),
        float(shape.decode_requests),
        float(shape.prefill_requests),
        float(shape.swapped_blocks),
        *([float(shape.shared_prefix_tokens)] if shares_reads else []),
    ]


def _smoothness(features: Array, seconds: Array, num_segments: int) -> Array:
    """Rows that are zero for a straight curve."""
    rows = np.zeros((num_segments - 1, features.shape[1]))
    for k in range(num_segments - 1):
        reached = features[:, 1 + k] > 0.0
        pull = SMOOTHNESS * max(1.0, gemm_knot(k + 1) / TILE_TOKENS)
        weight = np.sqrt(pull) / float(np.median(seconds[reached] if reached.any() else seconds))
        # Slopes are equal if increments are in proportion to their segments' widths.
        rows[k, 1 + k] = -weight * (gemm_knot(k + 2) - gemm_knot(k + 1)) / (gemm_knot(k + 1) - gemm_knot(k))
        rows[k, 2 + k] = weight
    return rows


def _cost(coefficients: list[float], num_segments: int) -> StepCost:
    fixed_s, *increments = coefficients[: 1 + num_segments]
    # Longer steps than the measured ones extend the last segment. They must not look cheaper by the token, or the
    # longest step would always seem to be the best one.
    start, end = gemm_knot(num_segments - 1), gemm_knot(num_segments)
    increments[-1] = max(increments[-1], sum(increments[:-1]) * (end - start) / (start - 1))
    knots = [0.0]
    for increment in increments:
        knots.append(knots[-1] + increment)
    pair_s, masked_pair_s, kv_token_s, ragged_s, decode_request_s, prefill_request_s, swap_block_s, *shared = (
        coefficients[1 + num_segments :]
    )
    return StepCost(
        fixed_s=fixed_s,
        gemm_curve_s=tuple(knots),
        pair_s=pair_s,
        masked_pair_s=masked_pair_s,
        kv_token_s=kv_token_s,
        ragged_s=ragged_s,
        decode_request_s=decode_request_s,
        prefill_request_s=prefill_request_s,
        swap_block_s=swap_block_s,
        shared_kv_token_s=sum(shared),
    )
