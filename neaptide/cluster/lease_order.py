"""Which chunks of the shared batches a server leases next, and how many. Plain code: no SQL, and no clock.

Servers pull their work. A chunk is some lines of one batch. A lease lends a chunk to one server for a while, under a
number (the epoch) that grows with every lease of the chunk. A server with an older number has lost the chunk, whether
it knows that or not, and its results are refused. ``batches/chunk_rows.py`` keeps the leases in the database, in the
order of ``sort_key``. The simulated cluster leases rows by the same rules (``simulation/shared_rows.py``).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MAX_CHUNK_LINES = 64
"""Small enough that the last chunk of all, which one server has alone, is soon done."""
MIN_LEASE_LINES, MAX_LEASE_LINES = 64, 256
"""Fewer lines would part what shares a prefix, more would let a server hoard."""
LEASE_BELOW_LINES = 64
"""A server leases more when fewer lines wait in its engine: they start as soon as its scheduler sees slack."""
LEASES_AHEAD = 4
"""Leases get smaller towards the end, so that this many are left for each server."""
LEASE_S = 15.0
DEADLINE_GRAIN_S = 900
"""Batches that end in the same quarter of an hour are equally urgent. Strict order of deadlines would leave a server
one batch at a time, and nothing to blend."""


class Side(StrEnum):
    """A side of the order by compute density, as in BlendServe's dual scan."""

    COMPUTE_BOUND = "compute"
    MEMORY_BOUND = "memory"


class ChunkKey(NamedTuple):
    """Names a chunk: its batch, and its number there."""

    batch_id: str
    chunk_no: int


@dataclass(frozen=True, slots=True)
class LeaseChunk:
    """Lines that are leased together."""

    key: ChunkKey
    expires_at_s: int
    """Deadline of the batch, in Unix seconds."""
    density: float
    """Compute time over memory time of its prompts and expected answers."""
    num_lines: int
    compute_s: float = 0.0
    memory_s: float = 0.0
    """Times of the chunk on a device, as known when the batch was cut; 0 if they were not known."""
    needs_tokens: int = 0
    """Context that its longest line needs, prompt and answer."""

    @property
    def deadline_class(self) -> int:
        """The quarter of an hour in which the batch ends."""
        return self.expires_at_s // DEADLINE_GRAIN_S


class ChunkLease(NamedTuple):
    """The right to end lines of a chunk, until a later lease of the chunk begins."""

    key: ChunkKey
    epoch: int


def chunk_sizes(num_lines: int) -> list[int]:
    """Lines of each chunk of a batch: at most ``MAX_CHUNK_LINES`` each, and equal but for one line."""
    count = math.ceil(num_lines / MAX_CHUNK_LINES)
    return [num_lines // count + (i < num_lines % count) for i in range(count)]


def lines_to_lease(num_left: int, num_servers: int) -> int:
    """Lines of the next lease, given how many lines and servers there are."""
    return min(max(num_left // (LEASES_AHEAD * max(num_servers, 1)), MIN_LEASE_LINES), MAX_LEASE_LINES)


def sort_key(deadline_class: int, density: float, key: ChunkKey, side: Side) -> tuple[int, float, str, int]:
    """The order in which chunks are leased: the most urgent batches first, and among those from one side."""
    return (deadline_class, -density if side is Side.COMPUTE_BOUND else density, *key)


def side_to_lease(compute_s: float, memory_s: float, wanted_density: float) -> Side:
    """The side that brings the leased work of a server (seconds) nearer to the density that it wants.

    This is BlendServe's dual scan with servers in place of its two pointers. Each server takes what it lacks, and all
    take from the same two sides.
    """
    return Side.COMPUTE_BOUND if compute_s <= wanted_density * memory_s else Side.MEMORY_BOUND


class Free(NamedTuple):
    """Chunks of one owner that may be leased, and are equally urgent."""

    owner: str
    deadline_class: int
    num_chunks: int


def owners_in_turn(free: Iterable[Free], held: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of the next ``count`` chunks each owner gets.

    The most urgent chunks come first. Among equally urgent ones the owner comes first of whom the server holds the
    fewest. So every server has work of every owner, as far as there is enough. Each server gives the owners their
    shares, and so do all servers together.

    Args:
        held: chunks of each owner that the server has on lease.
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
