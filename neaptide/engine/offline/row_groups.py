"""Rows of a job by length and by the prefix at the top of their tree: what a policy that compares rows looks at.

Echo (section 6): the offline pool is divided by length, and in each division organized by prefixes.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from neaptide.engine.arrays import IntArray


def length_bucket(num_tokens: int) -> int:
    """Requests in it are less than twice as long as each other."""
    return num_tokens.bit_length()


class RowGroups:
    """Rows that are left. In a group they stand in the tree's order, so that its first is what should come next.

    Args:
        rows: in the tree's order.
        num_tokens: [rows] of their prompts.
        tops: [rows] nodes at the top of the tree, or one number for those that share nothing.
    """

    def __init__(self, rows: IntArray, num_tokens: IntArray, tops: IntArray) -> None:
        self._groups: dict[tuple[int, int], deque[int]] = {}
        self._key_of: dict[int, tuple[int, int]] = {}
        buckets = np.frexp(num_tokens)[1]  # the exponent is the number's length in bits
        for row, bucket, top in zip(rows.tolist(), buckets.tolist(), tops.tolist(), strict=True):
            self._key_of[row] = (bucket, top)
            self._groups.setdefault((bucket, top), deque()).append(row)

    def __iter__(self) -> Iterator[tuple[int, int, deque[int]]]:
        """Length bucket, node and rows of every group, in the order of their first rows."""
        for (bucket, top), rows in self._groups.items():
            yield bucket, top, rows

    def remove(self, row: int) -> int:
        """Returns the row's node. Nearly always it is the first of its group."""
        bucket, top = self._key_of.pop(row)
        rows = self._groups[bucket, top]
        rows.remove(row)
        if not rows:
            del self._groups[bucket, top]
        return top
