"""Decides which chunk of the shared pool a replica leases next, and which replica holds it. Pure: no SQL, and time is
an argument.

Replicas pull. A chunk is some lines of one batch. A lease gives it to one replica for a limited time, under a number
(the epoch) that grows with each lease. A replica with an older number has lost the chunk, whether it knows or not: the
number fences it off. The database keeps the same board in a table and orders by the same keys
(``cluster/batches/lease_rows.py``). Servers lease several chunks at once, and fewer towards the end of the pool: as
many lines as a replica of the simulation takes (``cluster/simulation/row_order.py``).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MAX_CHUNK_LINES = 64
"""Small, because the last chunk of a pool is done by one replica alone."""
MIN_CLAIM_LINES, MAX_CLAIM_LINES = 64, 256
"""Fewer lines would split up rows that share a prefix; more would let one replica take too much."""
CLAIM_BELOW_LINES = 64
"""A replica leases more when fewer lines than this wait in its engine; they start when its scheduler sees slack."""
CLAIMS_AHEAD = 4
"""Leases get smaller towards the end of the pool: about this many per replica remain."""
LEASE_S = 15.0
DEADLINE_GRAIN_S = 900
"""Batches that end in the same quarter of an hour are equally urgent. A strict order of deadlines would leave a replica
one batch at a time, and nothing to blend."""


class End(StrEnum):
    """An end of the density order: compute-bound rows, or memory-bound rows."""

    DENSE = "dense"
    SPARSE = "sparse"


class ChunkKey(NamedTuple):
    """One chunk of one batch."""

    batch_id: str
    chunk_no: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that are leased together."""

    key: ChunkKey
    expires_at_s: int
    """Deadline of its batch."""
    density: float
    """Compute time over memory time of its prompts and expected answers."""
    num_lines: int
    compute_s: float = 0.0
    memory_s: float = 0.0
    """Compute and memory time of its lines, as known when the batch was cut; 0 if unknown."""
    needs_tokens: int = 0
    """Context length of its longest line, prompt and answer."""

    @property
    def deadline_class(self) -> int:
        return deadline_class(self.expires_at_s)


class Claim(NamedTuple):
    """The right to end lines of a chunk, until a later lease of it is made."""

    key: ChunkKey
    epoch: int


def chunk_sizes(num_lines: int) -> list[int]:
    """Lines of each chunk of a batch: at most ``MAX_CHUNK_LINES``, and equal within one line."""
    count = math.ceil(num_lines / MAX_CHUNK_LINES)
    return [num_lines // count + (i < num_lines % count) for i in range(count)]


def lines_to_claim(num_left: int, num_replicas: int) -> int:
    """Lines of the next lease, if this many are left for this many replicas."""
    return min(max(num_left // (CLAIMS_AHEAD * max(num_replicas, 1)), MIN_CLAIM_LINES), MAX_CLAIM_LINES)


def deadline_class(expires_at_s: int) -> int:
    """Order of urgency; equal within ``DEADLINE_GRAIN_S``."""
    return expires_at_s // DEADLINE_GRAIN_S


class Free(NamedTuple):
    """The free chunks of one owner that are equally urgent."""

    owner: str
    deadline_class: int
    num_chunks: int


def owners_in_turn(free: Iterable[Free], held: Mapping[str, int], count: int) -> dict[str, int]:
    """Divides the next ``count`` chunks among owners. The most urgent come first; among equally urgent ones, those of
    the owner with the fewest chunks in this replica (``held``).

    So every replica holds work of every owner as far as possible. Since each replica gives owners their shares of its
    work, they also have their shares of the total.
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
    """Sort key of the chunks that a replica leases: the most urgent first, among those from one end of the density
    order."""
    return (chunk.deadline_class, -chunk.density if end is End.DENSE else chunk.density, *chunk.key)


def end_to_take(compute_s: float, memory_s: float, wanted_density: float) -> End:
    """The end that moves the work held by a replica (seconds) towards the density that it wants.

    BlendServe's dual scan with replicas for its two pointers: each takes the kind that it lacks, and all take from the
    same two ends.
    """
    return End.DENSE if compute_s <= wanted_density * memory_s else End.SPARSE


@dataclass(slots=True)
class _Place:
    chunk: Chunk
    epoch: int = 0
    leased_until_s: float = -math.inf


class Board:
    """All chunks with unfinished lines."""

    def __init__(self) -> None:
        self._places: dict[ChunkKey, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._places[chunk.key] = _Place(chunk)

    def claim(self, end: End, now_s: float, limit: int = 1) -> list[Claim]:
        """Leases the next chunks that are free or whose lease has expired."""
        free = [place for place in self._places.values() if place.leased_until_s <= now_s]
        free.sort(key=lambda place: claim_order(place.chunk, end))
        for place in free[:limit]:
            place.epoch += 1
            place.leased_until_s = now_s + LEASE_S
        return [Claim(place.chunk.key, place.epoch) for place in free[:limit]]

    def holds(self, claim: Claim) -> bool:
        """Whether results under this lease are accepted. They still are after it expires, until another lease
        is made."""
        place = self._places.get(claim.key)
        return place is not None and place.epoch == claim.epoch

    def renew(self, claim: Claim, now_s: float) -> bool:
        """Renews a lease. False: another replica has the chunk, or it is done, so its lines should stop here."""
        if not self.holds(claim):
            return False
        self._places[claim.key].leased_until_s = now_s + LEASE_S
        return True

    def release(self, claim: Claim) -> bool:
        """Returns a chunk early. Results under the lease are still accepted, until the next one."""
        if not self.holds(claim):
            return False
        self._places[claim.key].leased_until_s = -math.inf
        return True

    def complete(self, claim: Claim) -> bool:
        """Removes a chunk of which all lines have ended."""
        if not self.holds(claim):
            return False
        del self._places[claim.key]
        return True

    def withdraw(self, batch_id: str) -> None:
        """Removes a batch that was cancelled or has ended; all of its leases become invalid."""
        for key in [key for key in self._places if key.batch_id == batch_id]:
            del self._places[key]
