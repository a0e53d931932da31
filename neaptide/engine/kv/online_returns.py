"""How often a cached block that online requests read last is hit again: the return of conversations."""

from collections import OrderedDict
from collections.abc import Iterable

FIRST_BLOCKS = 64.0
"""Initial count of ended stays and of returns, which makes the first share 1."""
MEMORY_BLOCKS = 8192
"""Number of ended stays after which both counts are halved."""


class _Share:
    """Returns per ended stay, with recent ones counting most."""

    def __init__(self) -> None:
        self._num_ended = self._num_returned = FIRST_BLOCKS

    @property
    def value(self) -> float:
        return self._num_returned / self._num_ended

    def end(self, count: int, num_returned: int) -> None:
        """Adds ended stays, of which some are returns."""
        self._num_ended += count
        self._num_returned += num_returned
        if self._num_ended > MEMORY_BLOCKS:
            self._num_ended, self._num_returned = self._num_ended / 2, self._num_returned / 2

    def come_back(self) -> None:
        """Makes an ended stay a return."""
        self._num_returned += 1


class OnlineReturns:
    """Share of cached online blocks that an online request hits again. Every event is O(1) per block.

    A block's stay begins when its last reader, an online request, releases it. It ends with a hit or with the block's
    eviction. An evicted block that a later request looks for counts as a return as well, because it would have been
    hit. So the share does not fall because blocks are evicted early.

    Args:
        num_remembered: evicted blocks whose hashes are remembered.
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of evicted blocks, the oldest first."""
        self._of_stays, self._of_evicted = _Share(), _Share()

    @property
    def share(self) -> float:
        """Returns per ended stay."""
        return self._of_stays.value

    @property
    def evicted_share(self) -> float:
        """Returns per evicted block."""
        return self._of_evicted.value

    def observe_hits(self, num_blocks: int) -> None:
        """Counts cached online blocks that an online request has hit."""
        if num_blocks:
            self._of_stays.end(num_blocks, num_blocks)

    def observe_evicted(self, block_hash: bytes) -> None:
        self._evicted[block_hash] = None
        self._evicted.move_to_end(block_hash)
        if len(self._evicted) > self._num_remembered:
            self._evicted.popitem(last=False)
        self._of_stays.end(1, 0)
        self._of_evicted.end(1, 0)

    def observe_wanted(self, hashes: Iterable[bytes]) -> None:
        """Counts returns after eviction. An online request has these consecutive blocks, and did not find the first of
        them in the cache."""
        for block_hash in hashes:
            if block_hash not in self._evicted:
                return
            del self._evicted[block_hash]
            self._of_stays.come_back()
            self._of_evicted.come_back()
