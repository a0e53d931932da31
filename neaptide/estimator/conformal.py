"""A quantile with measured coverage: adaptive conformal inference."""

from bisect import bisect_left, insort
from collections import deque
from math import ceil

MIN_LEVEL = -0.25
"""Misses are made up for later, by a bound above all recent scores, but not without end."""


class AdaptiveQuantile:
    """An upper bound for the next score that holds in a share ``1 - alpha`` of steps, whatever the scores do.

    The bound is a quantile of the last scores; its level moves against the misses (Gibbs and Candes 2021, equation 2:
    ``alpha_t += gamma * (alpha - missed)``), so that the share of misses comes out at ``alpha`` in the long run even
    when the scores drift.

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
        self._level = max(self._level + self._gamma * (self._alpha - missed), MIN_LEVEL)
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
