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
    """[requests] where each one's table begins."""

    @classmethod
    def of(cls, block_tables: IntArray, are_reversed: BoolArray | None = None) -> "StepTables":
        """Tables of one length: [requests, blocks] both; None for no reversed block."""
        entries = 2 * block_tables + (0 if are_reversed is None else are_reversed)
        return cls(entries.reshape(-1), np.arange(len(entries)) * entries.shape[1])

    def slots(self, requests: IntArray, positions: npt.NDArray[np.integer], block_size: int) -> IntArray:
        """Where in the cache the tokens at these positions of these requests lie."""
        entries = self.entries[self.starts[requests] + positions // block_size]
        offsets = positions % block_size
        slots: IntArray = (entries >> 1) * block_size
        slots += np.where(entries & 1 == 1, block_size - 1 - offsets, offsets)
        return slots

    @property
    def id_range(self) -> tuple[int, int]:
        """Least and greatest block."""
        return int(self.entries.min()) >> 1, int(self.entries.max()) >> 1
