"""Statistics of measurements that take turns, alone and with something else, in pairs."""

import math
import random
from collections.abc import Sequence
from itertools import chain

from neaptide.loadgen.percentiles import percentile

RESAMPLES = 2_000


def ratios(
    name: str, alone: Sequence[Sequence[float]], beside: Sequence[Sequence[float]], rng: random.Random
) -> dict[str, float]:
    """Median and 99th percentile of all turns together, alone and beside, and their ratios.

    Nine of ten ratios of pairs that are drawn with replacement lie between ``low`` and ``high``. How far the halves of
    the turns alone are apart says what such a ratio is worth.

    Args:
        name: with its unit, before every key.
        alone: by pair.
        beside: by pair.
    """
    found: dict[str, float] = {}
    for q, share in (("p50", 0.5), ("p99", 0.99)):

        def ratio(
            numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]], share: float = share
        ) -> float:
            return percentile([*chain(*numerator)], share) / percentile([*chain(*denominator)], share)

        drawn = [rng.choices(range(len(alone)), k=len(alone)) for _ in range(RESAMPLES)]
        resampled = [ratio([beside[i] for i in some], [alone[i] for i in some]) for some in drawn]
        quantity, _, unit = name.rpartition("_")
        found |= {
            f"{quantity}_{q}_{unit}_alone": percentile([*chain(*alone)], share),
            f"{quantity}_{q}_{unit}_beside": percentile([*chain(*beside)], share),
            f"{quantity}_{q}_ratio": ratio(beside, alone),
            f"{quantity}_{q}_ratio_low": percentile(resampled, 0.05),
            f"{quantity}_{q}_ratio_high": percentile(resampled, 0.95),
            f"{quantity}_{q}_ratio_of_halves_alone": ratio(alone[1::2], alone[::2]),
        }
    return found


def differences(
    name: str, alone: Sequence[Sequence[float]], beside: Sequence[Sequence[float]], rng: random.Random
) -> dict[str, float]:
    """The mean of all turns beside less that of all turns alone.

    Nine of ten of pairs that are drawn with replacement lie between ``low`` and ``high``: no width at all where every
    turn has the same mean, however few values that was seen on.

    Args:
        name: before every key.
        alone: by pair.
        beside: by pair.
    """

    def change(some: Sequence[int]) -> float:
        return _mean([*chain(*(beside[i] for i in some))]) - _mean([*chain(*(alone[i] for i in some))])

    resampled = [change(rng.choices(range(len(alone)), k=len(alone))) for _ in range(RESAMPLES)]
    return {
        f"{name}_change": change(range(len(alone))),
        f"{name}_change_low": percentile(resampled, 0.05),
        f"{name}_change_high": percentile(resampled, 0.95),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
