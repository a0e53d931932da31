"""Block tables: the blocks of each request, and the position of each token in them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import ONE, BlockArray, BoolArray, IntArray

REVERSED = 1 << 30
"""Direction bit of an entry: its tokens are stored from the block's last position to its first."""


class Entries(NamedTuple):
    """Entries of a block table, split into block ids and directions."""

    blocks: IntArray
    are_reversed: BoolArray

    @classmethod
    def of(cls, ids: BlockArray | IntArray) -> "Entries":
        wide = ids.astype(np.int64)
        return cls(wide & (REVERSED - 1), wide >= REVERSED)


class BlockTables:
    """Block tables of all slots, in one array that executors read directly.

    Token ``i`` of a request is in block ``i // block_size`` of its table, at position ``i % block_size``. In an entry
    with the direction bit, positions count from the block's end.
    """

    def __init__(self, num_slots: int, max_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self._block_size: IntArray = np.array(block_size)
        self.ids: BlockArray = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)
        """[slots, blocks]; entries after a slot's last block are undefined."""
        self.num_blocks: IntArray = np.zeros(num_slots, np.int64)

    def blocks(self, slot: int) -> list[int]:
        """The slot's entries, direction bits included."""
        blocks: list[int] = self.ids[slot, : self.num_blocks[slot]].tolist()
        return blocks

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        held = self.num_blocks[slot]
        self.ids[slot, held : held + len(block_ids)] = block_ids
        self.num_blocks[slot] += len(block_ids)

    def append_one_each(self, slots: IntArray, block_ids: Sequence[int]) -> None:
        held = self.num_blocks[slots]
        self.ids[slots, held] = block_ids
        self.num_blocks[slots] = held + ONE

    def write(self, slot: int, block_ids: Sequence[int]) -> None:
        """Replaces all entries of the slot."""
        self.ids[slot, : len(block_ids)] = block_ids
        self.num_blocks[slot] = len(block_ids)

    def cut(self, slot: int, num_blocks: int) -> list[int]:
        """Keeps the first ``num_blocks`` blocks; returns the others."""
        cut: list[int] = self.ids[slot, num_blocks : self.num_blocks[slot]].tolist()
        self.num_blocks[slot] = min(num_blocks, self.num_blocks[slot])
        return cut

    def are_full(self, slots: IntArray, num_tokens: IntArray) -> BoolArray:
        """Whether the blocks of each slot are full with ``num_tokens`` tokens, so that one more needs a new block."""
        full: BoolArray = num_tokens >= self.num_blocks[slots] * self._block_size
        return full

    def slots(self, slot: int, start: int, end: int) -> IntArray:
        """Cache positions of tokens ``start .. end - 1``: ``block * block_size + position``."""
        positions = np.arange(start, end)
        entries = Entries.of(self.ids[slot, positions // self.block_size])
        offsets = positions % self.block_size
        slots: IntArray = entries.blocks * self.block_size
        slots += np.where(entries.are_reversed, self.block_size - 1 - offsets, offsets)
        return slots
