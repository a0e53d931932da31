"""Block tables: which blocks hold a request's tokens, and in which slot each token lies."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import ONE, BlockArray, BoolArray, IntArray

REVERSED = 1 << 30
"""Direction bit of an entry: its tokens lie from the block's last slot to its first."""


class Entries(NamedTuple):
    """Entries of a block table, taken apart."""

    blocks: IntArray
    are_reversed: BoolArray

    @classmethod
    def of(cls, ids: BlockArray | IntArray) -> "Entries":
        wide = ids.astype(np.int64)
        return cls(wide & (REVERSED - 1), wide >= REVERSED)


class BlockTables:
    """One table per seat of the engine, in one array that executors read as it stands.

    Token ``i`` of a request lies in block ``i // block_size`` of its table, in slot ``i % block_size``; in an entry
    with the direction bit, in the slot that is as far from the block's end.
    """

    def __init__(self, num_seats: int, max_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self._block_size: IntArray = np.array(block_size)
        self.ids: BlockArray = np.zeros((num_seats, -(-max_tokens // block_size)), np.int32)
        """[seats, blocks]; what stands behind a seat's blocks means nothing."""
        self.num_blocks: IntArray = np.zeros(num_seats, np.int64)

    def blocks(self, seat: int) -> list[int]:
        """The entries, direction bits included."""
        blocks: list[int] = self.ids[seat, : self.num_blocks[seat]].tolist()
        return blocks

    def append(self, seat: int, block_ids: Sequence[int]) -> None:
        held = self.num_blocks[seat]
        self.ids[seat, held : held + len(block_ids)] = block_ids
        self.num_blocks[seat] += len(block_ids)

    def append_one_each(self, seats: IntArray, block_ids: Sequence[int]) -> None:
        held = self.num_blocks[seats]
        self.ids[seats, held] = block_ids
        self.num_blocks[seats] = held + ONE

    def write(self, seat: int, block_ids: Sequence[int]) -> None:
        """Puts other entries in the place of all that the seat has."""
        self.ids[seat, : len(block_ids)] = block_ids
        self.num_blocks[seat] = len(block_ids)

    def cut(self, seat: int, num_blocks: int) -> list[int]:
        """Leaves the first ``num_blocks`` blocks; returns the others."""
        cut: list[int] = self.ids[seat, num_blocks : self.num_blocks[seat]].tolist()
        self.num_blocks[seat] = min(num_blocks, self.num_blocks[seat])
        return cut

    def are_full(self, seats: IntArray, num_tokens: IntArray) -> BoolArray:
        """Whether each seat needs a new block for one token more than so many, which its blocks hold."""
        full: BoolArray = num_tokens >= self.num_blocks[seats] * self._block_size
        return full

    def slots(self, seat: int, start: int, end: int) -> IntArray:
        """Where tokens ``start .. end - 1`` lie in the pool: ``block * block_size + slot``."""
        positions = np.arange(start, end)
        entries = Entries.of(self.ids[seat, positions // self.block_size])
        offsets = positions % self.block_size
        slots: IntArray = entries.blocks * self.block_size
        slots += np.where(entries.are_reversed, self.block_size - 1 - offsets, offsets)
        return slots
