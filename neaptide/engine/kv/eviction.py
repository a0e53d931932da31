"""Which cached block goes first when no block is free."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

UNWANTED = 0
"""Bucket of blocks that no request is known to want."""
SEEN_ONLINE = 1
"""Of blocks that an online request read last: its conversation may go on."""
WANTED = 2
"""From here on: blocks that requests wait for, twice as many of them in every further bucket."""
NUM_BUCKETS = 16


def wanted_bucket(num_wanting: int) -> int:
    """Of blocks that so many requests want, at least one."""
    return min(WANTED + num_wanting.bit_length() - 1, NUM_BUCKETS - 1)


class EvictionOrder:
    """Cached blocks, first to go first: by bucket, and in it least recently released. Every operation is O(1).

    Source of the order: Echo section 4.2, with classes of expected reuse in place of its exact number.
    """

    def __init__(self) -> None:
        self._buckets: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(NUM_BUCKETS)]
        self._bucket_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, block: object) -> bool:
        return block in self._bucket_of

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._buckets)

    def bucket(self, number: int) -> Iterator[int]:
        """Its blocks, first to go first."""
        return iter(self._buckets[number])

    def bucket_of(self, block: int) -> int:
        return self._bucket_of[block]

    def add(self, block: int, bucket: int = UNWANTED) -> None:
        """The block has lost its last reader: from now on it goes last of its bucket."""
        self._buckets[bucket][block] = None
        self._bucket_of[block] = bucket

    def remove(self, block: int) -> None:
        """The block has a reader again, or nothing worth keeping."""
        del self._buckets[self._bucket_of.pop(block)][block]

    def pop(self, count: int) -> list[int]:
        """Takes the blocks that go first."""
        blocks = list(islice(self, count))
        for block in blocks:
            self.remove(block)
        return blocks
