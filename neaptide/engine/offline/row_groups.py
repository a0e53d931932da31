"""Groups a job's lines by length and by top prefix, for a policy that compares lines.

Echo (section 6) divides the offline pool by length, and each division by prefixes.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from neaptide.engine.arrays import IntArray


def length_bucket(num_tokens: int) -> int:
    """Bucket of a prompt length; lengths within a bucket differ by less than a factor of 2."""
    return num_tokens.bit_length()


class RowGroups:
    """Waiting lines in groups. Each group is in the tree's order, so its first line should come next.

    Args:
        rows: in the tree's order.
        num_tokens: [rows] prompt tokens.
        tops: [rows] top nodes of the tree, or one common number for lines that share nothing.
    """

    def __init__(self, rows: IntArray, num_tokens: IntArray, tops: IntArray) -> None:
        self._groups: dict[tuple[int, int], deque[int]] = {}
        self._key_of: dict[int, tuple[int, int]] = {}
        buckets = np.frexp(num_tokens)[1]  # The exponent is the bit length of the number.
        for row, bucket, top in zip(rows.tolist(), buckets.tolist(), tops.tolist(), strict=True):
            self._key_of[row] = (bucket, top)
            self._groups.setdefault((bucket, top), deque()).append(row)

    def __iter__(self) -> Iterator[tuple[int, int, deque[int]]]:
        """Length bucket, node and lines of every group, in the order of their first lines."""
        for (bucket, top), rows in self._groups.items():
            yield bucket, top, rows

    def remove(self, row: int) -> int:
        """Removes a line, which is nearly always the first of its group; returns its node."""
        bucket, top = self._key_of.pop(row)
        rows = self._groups[bucket, top]
        rows.remove(row)
        if not rows:
            del self._groups[bucket, top]
        return top
