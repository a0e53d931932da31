"""Values of single requests from a histogram's buckets and sum."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from neaptide.loadgen.workloads.lengths import shares_of

Buckets = Sequence[tuple[float, float]]
"""Upper limits, each with the observations in the bucket alone."""
OPEN_RATIO = 2.0
"""Upper limit of the last, open bucket over its lower limit, unless the sum needs more."""
ROUNDS = 60


def drawn_values(rng: np.random.Generator, buckets: Buckets, total: float) -> NDArray[np.float64]:
    """One value for each observation, inside its bucket, with the given sum as far as the buckets allow it.

    Within a bucket values are uniform, then moved up or down together until the sum is right. The order is random.
    """
    low, high = _limits(buckets, total)
    if not len(low):
        return low
    if len(low) == 1:
        return np.array([max(total, float(low[0]))])
    places = rng.random(len(low))
    # Powers keep the order of the places and stay inside 0..1.
    least, most = -ROUNDS / 2, ROUNDS / 2
    for _ in range(ROUNDS):
        middle = 0.5 * (least + most)
        if (low + places ** math.exp2(middle) * (high - low)).sum() > total:
            least = middle
        else:
            most = middle
    values: NDArray[np.float64] = low + places ** math.exp2(0.5 * (least + most)) * (high - low)
    return rng.permutation(values)


def drawn_counts(rng: np.random.Generator, buckets: Buckets, total: float) -> NDArray[np.int64]:
    """Whole values of at least 1 with exactly the given sum, each close to its bucket."""
    values = drawn_values(rng, buckets, total)
    whole = round(total)
    if not len(values):
        return np.zeros(0, np.int64)
    if whole <= len(values):
        return np.ones(len(values), np.int64)
    return shares_of(whole, np.maximum(values - 1.0, 1e-9))


def share_below(buckets: Buckets, limit: float) -> tuple[float, float, float] | None:
    """Share of the observations that are at most ``limit``: an estimate, the least and the most; None without any.

    The bounds are exact. The estimate takes observations to be spread evenly over the bucket that holds the limit.
    """
    count = sum(number for _, number in buckets)
    if count <= 0:
        return None
    below, start = 0.0, 0.0
    for end, number in buckets:
        if limit >= end:
            below, start = below + number, end
            continue
        part = (limit - start) / (end - start) if math.isfinite(end) and limit > start else 0.0
        most = below + number if limit > start else below
        return (below + part * number) / count, below / count, most / count
    return 1.0, 1.0, 1.0


def _limits(buckets: Buckets, total: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lower and upper limit of every observation's bucket."""
    low: list[float] = []
    high: list[float] = []
    start = 0.0
    for end, number in buckets:
        times = round(number)
        top = end if math.isfinite(end) else max(OPEN_RATIO * start, total - sum(low), start)
        low += times * [start]
        high += times * [top]
        start = end if math.isfinite(end) else start
    return np.array(low), np.array(high)
