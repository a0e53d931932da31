"""Eviction order of cached blocks."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

UNWANTED = 0
"""Bucket of blocks that no request is known to need."""
SEEN_ONLINE = 1
"""Bucket of blocks that an online request read last, as its conversation may continue."""
WANTED = 2
"""First bucket of blocks that waiting requests need. Each further bucket is for twice as many requests."""
PLANNED = 16
"""First bucket of blocks with a planned next use. Blocks with the latest use are evicted first."""
LAST_USE = (1 << 22) - 1
"""Latest planned use; later ones are treated like this one."""
NUM_BUCKETS = PLANNED + LAST_USE + 1


def wanted_bucket(num_wanting: int) -> int:
    """Bucket of blocks that ``num_wanting`` (at least 1) requests need."""
    return min(WANTED + num_wanting.bit_length() - 1, PLANNED - 1)


def planned_bucket(next_use: int) -> int:
    """Bucket of blocks whose next use has this place in the plan: Belady's choice, as far as the plan is kept."""
    return PLANNED + LAST_USE - min(next_use, LAST_USE)


def counted_bucket(num_wanting: int) -> int:
    """Bucket in an order with one bucket for each number of requests."""
    return WANTED + num_wanting - 1


class _Numbers:
    """Ascending set of numbers: bits of words, plus one word that marks the non-empty ones."""

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
    """Index of the lowest bit that is set."""
    return (word & -word).bit_length() - 1


class EvictionOrder:
    """Cached blocks in order of eviction: by bucket, then least recently released first. Every operation is O(1).

    Follows Echo, section 4.2, with classes of expected reuse in place of the exact number. Blocks with a planned next
    use follow Belady.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, OrderedDict[int, None]] = {}
        """Non-empty buckets by number."""
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
        """Numbers of the non-empty buckets, in order of eviction."""
        return self._numbers

    def bucket(self, number: int) -> Iterator[int]:
        """Blocks of a bucket in order of eviction."""
        return iter(self._buckets.get(number, ()))

    def num_in(self, bucket: int) -> int:
        """Number of blocks in the bucket."""
        return len(self._buckets.get(bucket, ()))

    def bucket_of(self, block: int) -> int:
        return self._bucket_of[block]

    def add(self, block: int, bucket: int = UNWANTED) -> None:
        """Adds a block that has lost its last reader, as the last of its bucket."""
        blocks = self._buckets.get(bucket)
        if blocks is None:
            blocks = self._buckets[bucket] = OrderedDict()
            self._numbers.add(bucket)
        blocks[block] = None
        self._bucket_of[block] = bucket

    def move(self, block: int, bucket: int) -> None:
        """Moves a block whose expected reuse has changed to the end of its new bucket."""
        self.remove(block)
        self.add(block, bucket)

    def remove(self, block: int) -> None:
        """Removes a block that has a reader again or has become worthless."""
        bucket = self._bucket_of.pop(block)
        del self._buckets[bucket][block]
        self._drop_if_empty(bucket)

    def pop(self, count: int) -> list[int]:
        """Removes and returns the first ``count`` blocks."""
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
    """Cached blocks in order of eviction, for unlimited exact buckets. A block that moves keeps its age.

    As published by Echo, sections 4.2 and 6: a priority queue by reference count, then by last access. It is one sorted
    list. An operation takes a search and shifts the entries after it, a few microseconds with ten thousand blocks.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int, int]] = []
        """Sorted entries (bucket, age, block)."""
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
        """Numbers of the non-empty buckets, in order of eviction."""
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
