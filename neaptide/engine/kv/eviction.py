"""Which cached block goes first when no block is free."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

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


def counted_bucket(num_wanting: int) -> int:
    """The same where every number has a bucket of its own."""
    return WANTED + num_wanting - 1


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

    @property
    def numbers(self) -> Iterable[int]:
        """Of the buckets that may have blocks, first to go first."""
        return range(NUM_BUCKETS)

    def bucket(self, number: int) -> Iterator[int]:
        """Its blocks, first to go first."""
        return iter(self._buckets[number])

    def num_in(self, bucket: int) -> int:
        """How many blocks the bucket has."""
        return len(self._buckets[bucket])

    def bucket_of(self, block: int) -> int:
        return self._bucket_of[block]

    def add(self, block: int, bucket: int = UNWANTED) -> None:
        """The block has lost its last reader: from now on it goes last of its bucket."""
        self._buckets[bucket][block] = None
        self._bucket_of[block] = bucket

    def move(self, block: int, bucket: int) -> None:
        """More or fewer requests want the block; it goes last of its new bucket."""
        self.remove(block)
        self.add(block, bucket)

    def remove(self, block: int) -> None:
        """The block has a reader again, or nothing worth keeping."""
        del self._buckets[self._bucket_of.pop(block)][block]

    def pop(self, count: int) -> list[int]:
        """Takes the blocks that go first."""
        blocks: list[int] = []
        for bucket in self._buckets:
            while bucket and len(blocks) < count:
                blocks.append(bucket.popitem(last=False)[0])
        for block in blocks:
            del self._bucket_of[block]
        return blocks


class CountedEvictionOrder:
    """The same for buckets without number, and exact in each: a block that moves keeps the age that it has.

    As published by Echo, sections 4.2 and 6: a priority queue by reference count, then by last access. One sorted list;
    an operation costs a search and the shifting of what stands behind, some microseconds with ten thousand blocks.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int, int]] = []
        """Bucket, age, block."""
        self._place_of: dict[int, tuple[int, int, int]] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: object) -> bool:
        return block in self._place_of

    def __iter__(self) -> Iterator[int]:
        return (block for _, _, block in self._order)

    @property
    def numbers(self) -> Iterable[int]:
        """Of the buckets that have blocks, first to go first."""
        place = 0
        while place < len(self._order):
            number = self._order[place][0]
            yield number
            place = self._first_of(number + 1)

    def bucket(self, number: int) -> Iterator[int]:
        return (self._order[place][2] for place in range(self._first_of(number), self._first_of(number + 1)))

    def num_in(self, bucket: int) -> int:
        return self._first_of(bucket + 1) - self._first_of(bucket)

    def bucket_of(self, block: int) -> int:
        return self._place_of[block][0]

    def add(self, block: int, bucket: int = UNWANTED) -> None:
        self._num_added += 1
        self._insert(bucket, self._num_added, block)

    def move(self, block: int, bucket: int) -> None:
        age = self._place_of[block][1]
        self.remove(block)
        self._insert(bucket, age, block)

    def remove(self, block: int) -> None:
        del self._order[bisect_left(self._order, self._place_of.pop(block))]

    def pop(self, count: int) -> list[int]:
        blocks = [block for _, _, block in self._order[:count]]
        del self._order[:count]
        for block in blocks:
            del self._place_of[block]
        return blocks

    def _insert(self, bucket: int, age: int, block: int) -> None:
        place = self._place_of[block] = (bucket, age, block)
        insort(self._order, place)

    def _first_of(self, number: int) -> int:
        return bisect_left(self._order, (number, 0, 0))
