"""Token counts with stated means and spreads.

Every draw is stratified: the values are a distribution's quantiles at evenly spaced ranks, in random order. So mean and
spread of a set are equal for every seed.
"""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
MISS = 0.02
"""Largest allowed relative error of a mean or spread."""


def uniform_lengths(rng: np.random.Generator, count: int, low: int, high: int) -> Tokens:
    """``count`` lengths spread evenly over low to high, inclusive."""
    lengths: Tokens = low + (_ranks(count) * (high - low + 1)).astype(np.int64)
    return rng.permutation(lengths)


def exponential_lengths(rng: np.random.Generator, count: int, mean: float) -> Tokens:
    """Exponential lengths of at least 1, with a standard deviation close to the mean."""
    shape = -np.log1p(-_ranks(count))
    return rng.permutation(_scaled(shape, mean))


def lognormal_lengths(
    rng: np.random.Generator, count: int, mean: float, std: float, low: int = 1, high: int = 1 << 20
) -> Tokens:
    """Log-normal lengths, clipped to low to high, with the stated mean and standard deviation after clipping.

    Clipping changes both, so the parameters are adjusted until they fit. Raises ValueError if the bounds allow no such
    distribution.
    """
    if count < 2:
        return np.full(count, round(mean), np.int64)
    normal = np.array([NormalDist().inv_cdf(rank) for rank in _ranks(count)])
    aim_mean, aim_std = mean, std
    lengths = np.zeros(count, np.int64)
    for _ in range(60):
        variance = np.log1p((aim_std / aim_mean) ** 2)
        drawn = np.exp(np.log(aim_mean) - variance / 2 + np.sqrt(variance) * normal)
        lengths = np.clip(np.rint(drawn), low, high).astype(np.int64)
        aim_mean *= mean / lengths.mean()
        aim_std *= std / max(lengths.std(), 1e-9)
    if abs(lengths.mean() / mean - 1) > MISS or abs(lengths.std() / std - 1) > MISS:
        raise ValueError(f"no log-normal lengths of {mean} +- {std} between {low} and {high}")
    return rng.permutation(lengths)


def sampled_lengths(rng: np.random.Generator, count: int, sample: Sequence[float], mean: float) -> Tokens:
    """Lengths distributed like a sample, scaled to a mean; at least 1."""
    return rng.permutation(_scaled(np.quantile(np.asarray(sample, float), _ranks(count)), mean))


def shares_of(total: int, weights: NDArray[np.float64]) -> Tokens:
    """Whole numbers of at least 1 in proportion to the weights, with the given sum. Largest remainders round up.

    Raises ValueError if there are more weights than ``total``.
    """
    if len(weights) > total:
        raise ValueError(f"{total} cannot be shared among {len(weights)}")
    exact = (total - len(weights)) * weights / weights.sum()
    shares: Tokens = exact.astype(np.int64)
    missing = total - len(weights) - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    shares += 1
    return shares


def _ranks(count: int) -> NDArray[np.float64]:
    return (np.arange(count) + 0.5) / count


def _scaled(shape: NDArray[np.float64], mean: float) -> Tokens:
    """Whole lengths of at least 1 in proportion to ``shape``, with the given mean."""
    scale = mean / shape.mean()
    lengths = np.ones(len(shape), np.int64)
    for _ in range(20):
        lengths = np.maximum(1, np.rint(shape * scale)).astype(np.int64)
        scale *= mean / lengths.mean()
    return lengths
