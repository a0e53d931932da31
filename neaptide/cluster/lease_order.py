"""Which chunk of the shared pool a replica takes next, and whose it is. Pure: no SQL, and time is passed in.

Replicas pull. A chunk is some lines of one batch; a claim lends it to a replica until a lease ends, under a number (the
epoch) that grows with each claim. A replica with an older number has lost the chunk, whether it knows or not: that is
the fence. The database keeps the same board in a table and orders by the same keys
(``server/batches/storing/claim_rows.py``). Servers take several chunks in one claim, and fewer of them towards the end
of the pool, as many lines as a replica of the simulation takes (``simulation/replicas/claim_order.py``).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MAX_CHUNK_LINES = 64
"""Small enough that the last chunk of a pool, which one replica has alone, is soon done."""
MIN_CLAIM_LINES, MAX_CLAIM_LINES = 64, 256
"""Fewer lines would part what shares a prefix, more would let a replica hoard."""
CLAIM_BELOW_LINES = 64
"""A replica claims when fewer lines wait in its engine: they start as its packer sees slack."""
CLAIMS_AHEAD = 4
"""Claims get smaller towards the end: so many would still be there for each replica."""
LEASE_S = 15.0
DEADLINE_GRAIN_S = 900
"""Batches that end in the same quarter of an hour are equally urgent: strict order of deadlines would leave a replica
one batch at a time, and nothing to blend."""


class End(StrEnum):
    """Of the density order: where compute weighs most, and where memory does."""

    DENSE = "dense"
    SPARSE = "sparse"


class ChunkKey(NamedTuple):
    """One chunk of one batch."""

    batch_id: str
    chunk_no: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that are claimed together."""

    key: ChunkKey
    expires_at_s: int
    """Of its batch."""
    density: float
    """Compute time over memory time of its prompts and expected answers."""
    num_lines: int
    compute_s: float = 0.0
    memory_s: float = 0.0
    """What it takes of the device, as far as that was known when the batch was cut: 0 if it was not."""
    needs_tokens: int = 0
    """The context that its longest line needs, prompt and answer."""

    @property
    def deadline_class(self) -> int:
        return deadline_class(self.expires_at_s)


class Claim(NamedTuple):
    """The right to end lines of a chunk, as long as no later claim of it has been made."""

    key: ChunkKey
    epoch: int


def chunk_sizes(num_lines: int) -> list[int]:
    """Lines of each chunk of a batch: none above ``MAX_CHUNK_LINES``, and no two apart by more than one."""
    count = math.ceil(num_lines / MAX_CHUNK_LINES)
    return [num_lines // count + (i < num_lines % count) for i in range(count)]


def lines_to_claim(num_left: int, num_replicas: int) -> int:
    """Of the next claim, if so many lines are left for so many replicas."""
    return min(max(num_left // (CLAIMS_AHEAD * max(num_replicas, 1)), MIN_CLAIM_LINES), MAX_CLAIM_LINES)


def deadline_class(expires_at_s: int) -> int:
    """What comes first; equal within ``DEADLINE_GRAIN_S``."""
    return expires_at_s // DEADLINE_GRAIN_S


class Free(NamedTuple):
    """Chunks of one owner that may be claimed, and are equally urgent."""

    owner: str
    deadline_class: int
    num_chunks: int


def owners_in_turn(free: Iterable[Free], held: Mapping[str, int], count: int) -> dict[str, int]:
    """Of the next so many chunks, how many each owner's are to be: the most urgent first, of equally urgent ones those
    of the owner of whom the replica holds the fewest.

    So every replica has work of every owner who has any, as far as it goes round; and since each gives them their
    shares of what it does, they have them of what all do together.
    """
    left = {(one.deadline_class, one.owner): one.num_chunks for one in free if one.num_chunks > 0}
    has, taken = Counter(held), Counter[str]()
    while left and taken.total() < count:
        place = min(left, key=lambda one: (one[0], has[one[1]], one[1]))
        has[place[1]] += 1
        taken[place[1]] += 1
        left[place] -= 1
        if not left[place]:
            del left[place]
    return dict(taken)


def claim_order(chunk: Chunk, end: End) -> tuple[int, float, str, int]:
    """Sorts chunks as a replica takes them: the most urgent batches, among those from one end of the density order."""
    return (chunk.deadline_class, -chunk.density if end is End.DENSE else chunk.density, *chunk.key)


def end_to_take(compute_s: float, memory_s: float, wanted_density: float) -> End:
    """The end that brings what a replica holds (seconds of its claimed work) nearer to the density that it wants.

    BlendServe's dual scan with replicas for its two pointers: each leans towards what it lacks, and all take from the
    same two ends.
    """
    return End.DENSE if compute_s <= wanted_density * memory_s else End.SPARSE


@dataclass(slots=True)
class _Place:
    chunk: Chunk
    epoch: int = 0
    leased_until_s: float = -math.inf


class Board:
    """All chunks with lines that have not ended."""

    def __init__(self) -> None:
        self._places: dict[ChunkKey, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._places[chunk.key] = _Place(chunk)

    def claim(self, end: End, now_s: float, limit: int = 1) -> list[Claim]:
        """Lends the next chunks that nobody holds, or whose lease is over."""
        free = [place for place in self._places.values() if place.leased_until_s <= now_s]
        free.sort(key=lambda place: claim_order(place.chunk, end))
        for place in free[:limit]:
            place.epoch += 1
            place.leased_until_s = now_s + LEASE_S
        return [Claim(place.chunk.key, place.epoch) for place in free[:limit]]

    def holds(self, claim: Claim) -> bool:
        """Whether results under this claim are taken: also after its lease, until another claim is made."""
        place = self._places.get(claim.key)
        return place is not None and place.epoch == claim.epoch

    def renew(self, claim: Claim, now_s: float) -> bool:
        """False when the chunk is another's, or done with: its lines need not go on here."""
        if not self.holds(claim):
            return False
        self._places[claim.key].leased_until_s = now_s + LEASE_S
        return True

    def release(self, claim: Claim) -> bool:
        """Gives a chunk back before its time. Results under the claim are still taken, until the next one."""
        if not self.holds(claim):
            return False
        self._places[claim.key].leased_until_s = -math.inf
        return True

    def complete(self, claim: Claim) -> bool:
        """Takes a chunk whose lines have all ended off the board."""
        if not self.holds(claim):
            return False
        del self._places[claim.key]
        return True

    def withdraw(self, batch_id: str) -> None:
        """Of a batch that is cancelled or over: all of its claims are void."""
        for key in [key for key in self._places if key.batch_id == batch_id]:
            del self._places[key]
