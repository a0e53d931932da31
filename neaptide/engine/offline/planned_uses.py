"""When rows that a plan knows, and that share a prefix, come next."""

import numpy as np

from neaptide.engine.arrays import IntArray

NEVER = int(np.iinfo(np.int64).max)
"""The use of a row that is not planned or does not wait."""


class PlannedUses:
    """The first planned use among any rows that follow one another, while rows leave.

    A tree of least values: a row that leaves, or a question, costs a few operations for each doubling of the rows,
    however many share a prefix and however deep prefixes stand above one another.

    Args:
        uses: [places] of the rows that stand there, ``NEVER`` of some.
    """

    def __init__(self, uses: IntArray) -> None:
        self._size = 1 << max(len(uses) - 1, 0).bit_length()
        level = np.full(self._size, NEVER)
        level[: len(uses)] = uses
        levels = [level]
        while len(level) > 1:
            level = np.minimum(level[0::2], level[1::2])
            levels.append(level)
        self._least: list[int] = [NEVER, *np.concatenate(levels[::-1]).tolist()]
        """As a heap: the least of all at 1, those of halves at 2 and 3, the places themselves from ``_size`` on."""

    def leave(self, place: int) -> None:
        """The row there does not wait any more."""
        least, at = self._least, self._size + place
        least[at] = NEVER
        while at > 1:
            at >>= 1
            left, right = least[2 * at], least[2 * at + 1]
            found = left if left < right else right
            if least[at] == found:
                return
            least[at] = found

    def first(self, begin: int, end: int) -> int | None:
        """Of the rows at these places; None if no plan knows one of them that waits."""
        least, low, high, found = self._least, self._size + begin, self._size + end, NEVER
        while low < high:
            if low & 1:
                found = min(found, least[low])
                low += 1
            if high & 1:
                high -= 1
                found = min(found, least[high])
            low, high = low >> 1, high >> 1
        return None if found == NEVER else found
