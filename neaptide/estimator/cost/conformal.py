"""A quantile with guaranteed long-run coverage: adaptive conformal inference."""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

MIN_LEVEL = -0.25
"""Lowest level. Below 0 the bound exceeds all recent scores, to compensate for misses, but within limits."""
MAX_LEVEL_FACTOR = 2.0
"""Highest level, as a multiple of ``alpha``. Exactly predictable steps never miss, and must not save up more misses
than that."""


class AdaptiveQuantile:
    """An upper bound for the next score that holds for a fraction ``1 - alpha`` of steps, for any sequence of scores.

    The bound is a quantile of the last scores. Its level moves against the misses (Gibbs and Candes 2021, equation 2:
    ``alpha_t += gamma * (alpha - missed)``). So the fraction of misses approaches ``alpha`` even if scores drift. The
    level stays between ``MIN_LEVEL`` and twice ``alpha``: a long calm does not lead to a run of misses. Where scores
    only fall, there may be fewer misses than ``alpha``.

    Args:
        gamma: how fast the level moves.
        window: number of scores kept.
        initial: smallest bound while there are too few scores.
    """

    def __init__(self, alpha: float, gamma: float = 0.01, window: int = 300, initial: float = 0.0) -> None:
        self._alpha = alpha
        self._gamma = gamma
        self._level = alpha
        self._initial = initial
        self._recent: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []
        self.value = initial
        """The current bound."""

    def observe(self, score: float, missed: bool) -> None:
        """Adds a score. ``missed``: whether it exceeded the bound at the time of its prediction."""
        level = self._level + self._gamma * (self._alpha - missed)
        self._level = min(max(level, MIN_LEVEL), MAX_LEVEL_FACTOR * self._alpha)
        if len(self._recent) == self._recent.maxlen:
            del self._ordered[bisect_left(self._ordered, self._recent[0])]
        self._recent.append(score)
        insort(self._ordered, score)
        count = len(self._ordered)
        rank = ceil((count + 1) * (1.0 - self._level))
        if rank <= count:
            self.value = self._ordered[max(rank, 1) - 1]
        else:
            self.value = max(self._ordered[-1], self._initial)
