"""A quantile with measured coverage: adaptive conformal inference."""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

MIN_LEVEL = -0.25
"""Misses are made up for later, by a bound above all recent scores, but not without end."""
MAX_LEVEL_FACTOR = 2.0
"""Of ``alpha``. Steps that nothing can make miss, exact ones say, earn no more misses than that."""


class AdaptiveQuantile:
    """An upper bound for the next score that holds in a share ``1 - alpha`` of steps, whatever the scores do.

    The bound is a quantile of the last scores; its level moves against the misses (Gibbs and Candes 2021, equation 2:
    ``alpha_t += gamma * (alpha - missed)``), so that the share of misses comes out at ``alpha`` in the long run even
    when the scores drift. The level is kept between ``MIN_LEVEL`` and twice ``alpha``: a long calm is not paid back by
    a run of misses, and there may be fewer misses than ``alpha`` where scores only fall.

    Args:
        gamma: how fast the level moves.
        window: scores that are remembered.
        initial: the bound at least, while there are too few scores for one.
    """

    def __init__(self, alpha: float, gamma: float = 0.01, window: int = 300, initial: float = 0.0) -> None:
        self._alpha = alpha
        self._gamma = gamma
        self._level = alpha
        self._initial = initial
        self._recent: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []
        self.value = initial
        """The bound."""

    def observe(self, score: float, missed: bool) -> None:
        """``missed``: whether the score was above the bound that stood when it was predicted."""
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
