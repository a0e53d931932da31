"""The block tables of a step's requests, one behind the other: what a step costs the host goes by the blocks that its
requests have, and a long context among short ones pads none of them."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class StepTables(NamedTuple):
    entries: IntArray
    """[blocks of all requests] ``block * 2 + is_reversed``: a reversed block has its tokens from its last slot back.
    Two tenants of a block share no entry. What stands behind a request's last block means nothing."""
    starts: IntArray
    """[requests] where each one's table begins, ascending: a table ends where the next one begins, or before."""

    @classmethod
    def of(cls, block_tables: IntArray, are_reversed: BoolArray | None = None) -> "StepTables":
        """Tables of one length: [requests, blocks] both; None for no reversed block."""
        entries = 2 * block_tables + (0 if are_reversed is None else are_reversed)
        return cls(entries.reshape(-1), np.arange(len(entries)) * entries.shape[1])

    def slots(self, requests: IntArray, positions: npt.NDArray[np.integer], block_size: int) -> IntArray:
        """Where in the cache the tokens at these positions of these requests lie."""
        places, offsets = np.divmod(positions, block_size)
        entries = self.entries.take(self.starts.take(requests) + places)
        are_reversed = entries & 1
        slots: IntArray = (entries >> 1) * block_size
        slots += np.where(are_reversed, block_size - 1 - offsets, offsets) if are_reversed.any() else offsets
        return slots

    def padded(self, first: int, last: int, num_blocks: IntArray, width: int) -> IntArray:
        """[(last - first) * width] entries of neighbours, of which each has so many blocks and one ``width``: the last
        ones of the others are repeated."""
        starts, count = self.starts[first:last], last - first
        begin = int(starts[0])
        if int(starts[-1]) - begin == (count - 1) * width and int(num_blocks.sum()) == count * width:
            return self.entries[begin : begin + count * width]
        places = np.minimum(np.arange(width), num_blocks[:, None] - 1)
        places += starts[:, None]
        return self.entries.take(places.reshape(-1))

    @property
    def id_range(self) -> tuple[int, int]:
        """Least and greatest block."""
        return int(self.entries.min()) >> 1, int(self.entries.max()) >> 1
