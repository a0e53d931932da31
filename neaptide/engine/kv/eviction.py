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
PLANNED = 16
"""From here on: blocks of which a plan says when they come again, those first that come last."""
LAST_USE = (1 << 22) - 1
"""Later uses count as this one."""
NUM_BUCKETS = PLANNED + LAST_USE + 1


def wanted_bucket(num_wanting: int) -> int:
    """Of blocks that so many requests want, at least one."""
    return min(WANTED + num_wanting.bit_length() - 1, PLANNED - 1)


def planned_bucket(next_use: int) -> int:
    """Of blocks that come again at this place of the plan: Belady's choice, as far as the plan is kept."""
    return PLANNED + LAST_USE - min(next_use, LAST_USE)


def counted_bucket(num_wanting: int) -> int:
    """The same where every number has a bucket of its own."""
    return WANTED + num_wanting - 1


class _Numbers:
    """A set of numbers in ascending order: bits of words, and of one word that says which of these are not empty."""

    WORD_BITS = 12

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._used = 0

    def __iter__(self) -> Iterator[int]:
        used = self._used
        while used:
            place = _lowest(used)
            used &= used - 1
            word = self._words[place]
            while word:
                yield (place << self.WORD_BITS) + _lowest(word)
                word &= word - 1

    def add(self, number: int) -> None:
        place = number >> self.WORD_BITS
        self._words[place] = self._words.get(place, 0) | 1 << (number & (1 << self.WORD_BITS) - 1)
        self._used |= 1 << place

    def remove(self, number: int) -> None:
        place = number >> self.WORD_BITS
        self._words[place] ^= 1 << (number & (1 << self.WORD_BITS) - 1)
        if not self._words[place]:
            del self._words[place]
            self._used ^= 1 << place


def _lowest(word: int) -> int:
    """The place of the lowest bit that is set."""
    return (word & -word).bit_length() - 1


class EvictionOrder:
    """Cached blocks, first to go first: by bucket, and in it least recently released. Every operation is O(1).

    Source of the order: Echo section 4.2, with classes of expected reuse in place of its exact number; where a plan
    says when a block comes again, Belady's.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[int, None]] = {}
        """By number, of those with blocks."""
        self._numbers = _Numbers()
        self._bucket_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __contains__(self, block: object) -> bool:
        return block in self._bucket_of

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(self.bucket, self._numbers))

    @property
    def numbers(self) -> Iterable[int]:
        """Of the buckets that have blocks, first to go first."""
        return self._numbers

    def bucket(self, number: int) -> Iterator[int]:
        """Its blocks, first to go first."""
        return iter(self._buckets.get(number, ()))

    def num_in(self, bucket: int) -> int:
        """How many blocks the bucket has."""
        return len(self._buckets.get(bucket, ()))

    def bucket_of(self, block: int) -> int:
        return self._bucket_of[block]

    def add(self, block: int, bucket: int = UNWANTED) -> None:
        """The block has lost its last reader: from now on it goes last of its bucket."""
        blocks = self._buckets.get(bucket)
        if blocks is None:
            blocks = self._buckets[bucket] = OrderedDict()
            self._numbers.add(bucket)
        blocks[block] = None
        self._bucket_of[block] = bucket

    def move(self, block: int, bucket: int) -> None:
        """More or fewer requests want the block, or sooner or later; it goes last of its new bucket."""
        self.remove(block)
        self.add(block, bucket)

    def remove(self, block: int) -> None:
        """The block has a reader again, or nothing worth keeping."""
        bucket = self._bucket_of.pop(block)
        del self._buckets[bucket][block]
        self._drop_if_empty(bucket)

    def pop(self, count: int) -> list[int]:
        """Takes the blocks that go first."""
        blocks: list[int] = []
        for number in self._numbers:
            bucket = self._buckets[number]
            while bucket and len(blocks) < count:
                blocks.append(bucket.popitem(last=False)[0])
            self._drop_if_empty(number)
            if len(blocks) == count:
                break
        for block in blocks:
            del self._bucket_of[block]
        return blocks

    def _drop_if_empty(self, number: int) -> None:
        if not self._buckets[number]:
            del self._buckets[number]
            self._numbers.remove(number)


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
