"""Pairs of runs: what one policy gains over another, summed with its uncertainty, and the verdicts of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neaptide_lab.experiments.judgement.worker import Figures

DRAWS = 10_000
TAIL = 0.05
"""Each end of the interval that holds 90% of the means of resampled pairs."""
LEAST_TOKENS_PER_S = 1.0
"""Less offline work is none."""
NAMED_POINTS = -2.0
"""A cell that loses more points than this is named."""


@dataclass(slots=True, frozen=True)
class Pair:
    """One cell under the judged policy and under the one that it is held against."""

    cell: str
    ours: Figures
    other: Figures
    case: str = ""

    @property
    def points(self) -> float | None:
        """Attainment gained, in points; None without online requests."""
        if self.ours.attained is None or self.other.attained is None:
            return None
        return round(100.0 * (self.ours.attained - self.other.attained), 9)

    @property
    def longest_points(self) -> float | None:
        if self.ours.longest is None or self.other.longest is None:
            return None
        return 100.0 * (self.ours.longest - self.other.longest)

    @property
    def requests(self) -> int:
        """More requests in time."""
        return round((self.points or 0.0) * self.ours.requests / 100.0)

    @property
    def offline_ratio(self) -> float | None:
        """Offline work over the other's; None where it did next to none."""
        if self.other.offline_tokens_per_s < LEAST_TOKENS_PER_S:
            return None
        return self.ours.offline_tokens_per_s / self.other.offline_tokens_per_s


@dataclass(slots=True, frozen=True)
class Interval:
    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean with the interval that holds 90% of the means of resampled values. The same values give the same."""
    given = np.asarray(values, float)
    rng = np.random.default_rng(seed)
    means = given[rng.integers(len(given), size=(DRAWS, len(given)))].mean(axis=1)
    low, high = np.quantile(means, (TAIL, 1.0 - TAIL))
    return Interval(float(given.mean()), float(low), float(high))


def not_below(interval: Interval, points: float) -> bool:
    """Whether the pairs are not below by so many points: the mean is at least ``-points`` and the lower end at least
    three times that."""
    return interval.mean >= -points and interval.low >= -3.0 * points


@dataclass(slots=True, frozen=True)
class Summary:
    """Pairs of one case, summed."""

    pairs: tuple[Pair, ...]

    @property
    def num_requests(self) -> int:
        return sum(pair.ours.requests for pair in self.pairs)

    @property
    def requests(self) -> int:
        return sum(pair.requests for pair in self.pairs)

    @property
    def points(self) -> Interval | None:
        """Mean of the pairs' points, each pair alike; None without online requests."""
        values = [pair.points for pair in self.pairs if pair.points is not None]
        return bootstrap(values) if values else None

    @property
    def offline_ratio(self) -> float | None:
        """Geometric mean over the cases of all offline work over all of the other's: where there is next to none of it,
        a ratio of single cells says nothing. None without offline work."""
        by_case: dict[str, tuple[float, float]] = {}
        for pair in self.pairs:
            ours, other = by_case.get(pair.case, (0.0, 0.0))
            by_case[pair.case] = (ours + pair.ours.offline_tokens_per_s, other + pair.other.offline_tokens_per_s)
        ratios = [ours / other for ours, other in by_case.values() if other >= LEAST_TOKENS_PER_S]
        return math.prod(ratios) ** (1.0 / len(ratios)) if ratios else None

    @property
    def longest_points(self) -> float | None:
        values = [pair.longest_points for pair in self.pairs if pair.longest_points is not None]
        return sum(values) / len(values) if values else None

    @property
    def named(self) -> list[Pair]:
        """Pairs that lose more than ``NAMED_POINTS``, the worst first."""
        lost = [pair for pair in self.pairs if pair.points is not None and pair.points < NAMED_POINTS]
        return sorted(lost, key=lambda pair: pair.points or 0.0)
