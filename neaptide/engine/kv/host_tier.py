"""Host tier of the KV cache: evicted blocks that requests may need again.

A block is copied only when it is evicted. This is BROS's lazy checkpoint (section 5.2) with whole hashed blocks in
place of slots. So it serves every reader of a prefix, not only the preempted request.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class HostTier:
    """Map from block hashes to slots of host memory; evicts the least recently used block.

    Args:
        num_slots: blocks that fit into host memory.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Slot of each block hash, the least recently used first."""
        self._blocks: list[bytes | None] = [None] * num_slots
        """Block hash of each slot."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[int] = Counter()
        """Number of running steps that read each slot."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._slots

    def longest_run(self, hashes: Sequence[bytes]) -> int:
        """Length of the longest prefix of ``hashes`` that host memory has."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._slots:
                break
            count += 1
        return count

    def pin(self, hashes: Iterable[bytes]) -> None:
        """Keeps the slots of these blocks until the step that reads them has ended, as it may be run again."""
        self._pins.update(self._slots[block_hash] for block_hash in hashes)

    def unpin(self, slots: Iterable[int]) -> None:
        """Ends the reads of a step from these slots."""
        for slot in slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if self._blocks[slot] is None:
                    self._free.append(slot)

    def take_in(self, block_hash: bytes) -> int | None:
        """The slot that a block is to be copied to; None if the block is here already or no slot can be freed."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        if not self._free:
            oldest = next((each for each, slot in self._slots.items() if slot not in self._pins), None)
            if oldest is None:
                return None
            self.discard(oldest)
        slot = self._slots[block_hash] = self._free.pop()
        self._blocks[slot] = block_hash
        return slot

    def read(self, block_hash: bytes) -> int:
        """The slot of a block that is here; the block stays."""
        self._slots.move_to_end(block_hash)
        return self._slots[block_hash]

    def discard(self, block_hash: bytes) -> None:
        """Drops a block that is invalid or evicted."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._blocks[slot] = None
            if slot not in self._pins:
                self._free.append(slot)

    def discard_slots(self, slots: Iterable[int]) -> None:
        """Drops the blocks of slots whose copies may have failed."""
        for slot in slots:
            block_hash = self._blocks[slot]
            if block_hash is not None:
                self.discard(block_hash)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot holds one block, is free, or waits for a step that reads it."""
        assert all(self._blocks[slot] == block_hash for block_hash, slot in self._slots.items())
        held = {slot for slot, block_hash in enumerate(self._blocks) if block_hash is not None}
        assert len(held) == len(self._slots), "a slot of host memory holds a block that is not found"
        slots = [*(held | self._pins.keys()), *self._free]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of host memory is lost or held twice"
