"""Next planned use of lines that share a prefix."""

import numpy as np

from neaptide.engine.arrays import IntArray

NEVER = int(np.iinfo(np.int64).max)
"""Use of a line that is not planned or does not wait."""


class PlannedUses:
    """First planned use within any range of places, while lines leave.

    A tree of minimums: removing a line and a query take O(log lines), however many lines share a prefix.

    Args:
        uses: [places] planned use of the line at each place; ``NEVER`` without one.
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
        """Binary tree as an array: the minimum of all at 1, those of the halves at 2 and 3, the places from ``_size``
        on."""

    def leave(self, place: int) -> None:
        """Removes the line at this place, as it does not wait any more."""
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
        """First use of the lines at places ``begin .. end - 1``; None if no waiting one is planned."""
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
