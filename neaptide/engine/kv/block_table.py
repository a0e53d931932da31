"""Block tables: which blocks hold a request's tokens, and in which slot each token lies."""

from collections.abc import Sequence

import numpy as np

from neaptide.engine.arrays import BlockArray, BoolArray, IntArray


class BlockTables:
    """One table per seat of the engine, in one array that executors read as it stands.

    Token ``i`` of a request lies in slot ``i % block_size`` of block ``i // block_size`` of its table.
    """

    def __init__(self, num_seats: int, max_tokens: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids: BlockArray = np.zeros((num_seats, -(-max_tokens // block_size)), np.int32)
        """[seats, blocks]; what stands behind a seat's blocks means nothing."""
        self.num_blocks: IntArray = np.zeros(num_seats, np.int64)

    def blocks(self, seat: int) -> list[int]:
        blocks: list[int] = self.ids[seat, : self.num_blocks[seat]].tolist()
        return blocks

    def append(self, seat: int, block_ids: Sequence[int]) -> None:
        held = self.num_blocks[seat]
        self.ids[seat, held : held + len(block_ids)] = block_ids
        self.num_blocks[seat] += len(block_ids)

    def append_one_each(self, seats: IntArray, block_ids: Sequence[int]) -> None:
        self.ids[seats, self.num_blocks[seats]] = block_ids
        self.num_blocks[seats] += 1

    def cut(self, seat: int, num_blocks: int) -> list[int]:
        """Leaves the first ``num_blocks`` blocks; returns the others."""
        cut: list[int] = self.ids[seat, num_blocks : self.num_blocks[seat]].tolist()
        self.num_blocks[seat] = min(num_blocks, self.num_blocks[seat])
        return cut

    def are_full(self, seats: IntArray, num_tokens: IntArray) -> BoolArray:
        """Whether each seat needs a new block for one token more than so many, which its blocks hold."""
        full: BoolArray = num_tokens >= self.num_blocks[seats] * self.block_size
        return full

    def slots(self, seat: int, start: int, end: int) -> IntArray:
        """Where tokens ``start .. end - 1`` lie in the pool: ``block * block_size + slot``."""
        positions = np.arange(start, end)
        blocks = self.ids[seat, positions // self.block_size].astype(np.int64)
        slots: IntArray = blocks * self.block_size + positions % self.block_size
        return slots
