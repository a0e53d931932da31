"""Concatenated block tables of a step's requests.

The host's cost depends on the blocks that the requests have; a long context does not pad the short ones.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class StepTables(NamedTuple):
    entries: IntArray
    """[blocks of all requests] ``block * 2 + is_reversed``: a reversed block stores its tokens from its last slot.

    A block that two requests share may be plain for one and reversed for the other. Entries after a request's last
    block are undefined.
    """
    starts: IntArray
    """[requests] Start of each table, ascending. A table ends at the next one's start or earlier."""

    @classmethod
    def of(cls, block_tables: IntArray, are_reversed: BoolArray | None = None) -> "StepTables":
        """Tables of equal length, both [requests, blocks]; None means that no block is reversed."""
        entries = 2 * block_tables + (0 if are_reversed is None else are_reversed)
        return cls(entries.reshape(-1), np.arange(len(entries)) * entries.shape[1])

    def slots(self, requests: IntArray, positions: npt.NDArray[np.integer], block_size: int) -> IntArray:
        """Cache slots of the tokens at these positions of these requests."""
        places, offsets = np.divmod(positions, block_size)
        entries = self.entries.take(self.starts.take(requests) + places)
        are_reversed = entries & 1
        slots: IntArray = (entries >> 1) * block_size
        slots += np.where(are_reversed, block_size - 1 - offsets, offsets) if are_reversed.any() else offsets
        return slots

    def padded(self, first: int, last: int, num_blocks: IntArray, width: int) -> IntArray:
        """[(last - first) * width] Entries of neighbouring requests, padded to ``width`` with each one's last entry.

        Each has ``num_blocks`` blocks; at least one has ``width``.
        """
        starts, count = self.starts[first:last], last - first
        begin = int(starts[0])
        if int(starts[-1]) - begin == (count - 1) * width and int(num_blocks.sum()) == count * width:
            return self.entries[begin : begin + count * width]
        places = np.minimum(np.arange(width), num_blocks[:, None] - 1)
        places += starts[:, None]
        return self.entries.take(places.reshape(-1))

    @property
    def id_range(self) -> tuple[int, int]:
        """Smallest and largest block id."""
        return int(self.entries.min()) >> 1, int(self.entries.max()) >> 1
