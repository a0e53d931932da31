"""KV blocks in host memory: what left the cache of the device and is wanted again.

A block is copied out at the moment when it is evicted, and only then: what is never evicted is never copied. This is
BROS's lazy checkpoint (section 5.2) with whole hashed blocks in place of slots, so that it serves every reader of
a prefix and not the preempted request alone.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class HostTier:
    """Which slot of host memory holds which block, by its hash; the least recently used one makes way.

    Args:
        num_slots: blocks that fit into host memory.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._pinned: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._slots

    def longest_run(self, hashes: Sequence[bytes]) -> int:
        """How many of the first of these are here, one after the other."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self._slots:
                break
            count += 1
        return count

    def pin(self, hashes: Iterable[bytes]) -> None:
        """These will be read by the step that is being put together: none of them makes way before ``unpin``."""
        self._pinned.update(hashes)

    def unpin(self) -> None:
        self._pinned.clear()

    def take_in(self, block_hash: bytes) -> int | None:
        """The slot that a block is to be copied to; None if it is here already, or no other may make way for it."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        if not self._free and not self._drop_oldest():
            return None
        slot = self._slots[block_hash] = self._free.pop()
        return slot

    def read(self, block_hash: bytes) -> int:
        """The slot of a block that is here; it stays."""
        self._slots.move_to_end(block_hash)
        return self._slots[block_hash]

    def discard(self, block_hash: bytes) -> None:
        """What is in the block is not to be trusted."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def discard_slots(self, slots: Iterable[int]) -> None:
        """What was to be copied to these slots may never have come there."""
        lost = set(slots)
        for block_hash in [block_hash for block_hash, slot in self._slots.items() if slot in lost]:
            self.discard(block_hash)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free or holds one block."""
        slots = [*self._slots.values(), *self._free]
        assert sorted(slots) == list(range(self.num_slots)), "a slot of host memory is lost or held twice"

    def _drop_oldest(self) -> bool:
        oldest = next((block_hash for block_hash in self._slots if block_hash not in self._pinned), None)
        if oldest is not None:
            self.discard(oldest)
        return oldest is not None
