"""Leases of chunks in the ``batch_chunks`` table: which server may end which lines. Each runs inside a transaction.

Chunks are leased in the order of ``lease_order.sort_key``. ``now_ms`` may be a number or the database's own clock, so
that servers need not agree on the time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from neaptide.cluster.lease_order import (
    LEASE_S,
    MAX_CHUNK_LINES,
    ChunkKey,
    ChunkLease,
    Free,
    LeaseChunk,
    Side,
    lines_to_lease,
    sort_key,
)
from neaptide.server.batches.served import NO_LIMIT
from neaptide.server.batches.sharing import JobLeft
from neaptide.server.batches.storing.database_clock import Milliseconds, database_now_ms
from neaptide.server.batches.storing.models import BatchStatus, LineState
from neaptide.server.batches.storing.tables import batch_chunks, batch_lines, batches

_LEASE_MS = int(LEASE_S * 1000)
_KEY = sa.tuple_(batch_chunks.c.batch_id, batch_chunks.c.chunk_no)


@dataclass(frozen=True, slots=True)
class LeasingServer:
    """A server that leases chunks, as its leases and their conditions need it."""

    name: str
    fingerprint: str
    """Names its model and tokenizer: it leases no chunk that was made for others."""
    lease_ms: int = _LEASE_MS
    max_model_len: int = NO_LIMIT
    """Longest context, prompt and answer. It leases no chunk with a line that needs more."""


class Excluded(NamedTuple):
    """Chunks and batches that a server does not lease."""

    chunks: Sequence[ChunkKey] = ()
    """Chunks that it has, perhaps under a lease that is over, and chunks that it cannot run."""
    batches: Sequence[str] = ()
    """Batches of which it runs no chunk."""


NOTHING = Excluded()


class FreeChunks(NamedTuple):
    """Chunks that a server may lease now."""

    free: Sequence[Free]
    mean_density: float
    num_others: int
    """Other servers that have chunks on lease."""

    @property
    def num_free(self) -> int:
        return sum(one.num_chunks for one in self.free)

    @property
    def chunks_to_lease(self) -> int:
        """How many chunks to lease at once."""
        num_lines = lines_to_lease(self.num_free * MAX_CHUNK_LINES, 1 + self.num_others)
        return num_lines // MAX_CHUNK_LINES


def free_chunks(conn: sa.Connection, server: LeasingServer, excluded: Excluded = NOTHING) -> FreeChunks:
    """Reads the chunks that the server may lease now, by the database's clock."""
    t, now_ms = batch_chunks.c, database_now_ms(conn)
    sums = sa.func.count(), sa.func.sum(t.density)
    by_owner = sa.select(batches.c.owner, t.deadline_class, *sums).join_from(
        batch_chunks, batches, t.batch_id == batches.c.id
    )
    by_owner = by_owner.where(t.leased_until_ms <= now_ms, _for(server, excluded))
    by_owner = by_owner.group_by(batches.c.owner, t.deadline_class)
    rows = conn.execute(by_owner.order_by(t.deadline_class, batches.c.owner)).all()
    free = [Free(owner, deadline_class, num_chunks) for owner, deadline_class, num_chunks, _ in rows]
    density = sum(row[3] for row in rows) / max(sum(one.num_chunks for one in free), 1)
    others = sa.select(sa.func.count(t.holder.distinct())).where(t.leased_until_ms > now_ms, t.holder != server.name)
    return FreeChunks(free, float(density), conn.execute(others).scalar_one())


def _for(server: LeasingServer, excluded: Excluded) -> sa.ColumnElement[bool]:
    running = (batches.c.status == BatchStatus.IN_PROGRESS, batches.c.outcome.is_(None))
    of_model = sa.select(batches.c.id).where(*running, batches.c.model_fingerprint == server.fingerprint)
    of_model = of_model.where(batches.c.id.not_in(excluded.batches))
    fits = batch_chunks.c.needs_tokens <= server.max_model_len
    return fits & batch_chunks.c.batch_id.in_(of_model) & _KEY.not_in([tuple(key) for key in excluded.chunks])


def add_chunks(conn: sa.Connection, chunks: Mapping[LeaseChunk, Sequence[int]]) -> None:
    """Offers lines of a batch for leases, given the line numbers of each chunk."""
    rows = [
        {
            "batch_id": chunk.key.batch_id,
            "chunk_no": chunk.key.chunk_no,
            "deadline_class": chunk.deadline_class,
            "density": chunk.density,
            "compute_s": chunk.compute_s,
            "memory_s": chunk.memory_s,
            "needs_tokens": chunk.needs_tokens,
        }
        for chunk in chunks
    ]
    if not rows:
        return
    conn.execute(batch_chunks.insert(), rows)
    if conn.dialect.name == "postgresql":
        conn.execute(_placing(chunks))
        return
    t = batch_lines.c
    for chunk, line_nos in chunks.items():
        where = (t.batch_id == chunk.key.batch_id, t.line_no.in_(line_nos))
        conn.execute(batch_lines.update().where(*where).values(chunk_no=chunk.key.chunk_no))


def _placing(chunks: Mapping[LeaseChunk, Sequence[int]]) -> sa.Update:
    """Sets the chunk of every line by one join.

    With a statement for each chunk PostgreSQL would read the whole batch each time: it has no statistics of a new one.
    """
    placed = [(*chunk.key, line_no) for chunk, line_nos in chunks.items() for line_no in line_nos]
    types = (sa.String, sa.Integer, sa.Integer)
    arrays: list[sa.ColumnElement[Any]] = [
        sa.literal(list(column), ARRAY(kind)) for column, kind in zip(zip(*placed, strict=True), types, strict=True)
    ]
    given = sa.func.unnest(*arrays).table_valued("batch_id", "chunk_no", "line_no", name="placed").render_derived()
    t = batch_lines.c
    where = (t.batch_id == given.c.batch_id, t.line_no == given.c.line_no)
    return batch_lines.update().where(*where).values(chunk_no=given.c.chunk_no)


def backlog(conn: sa.Connection, fingerprint: str) -> list[JobLeft]:
    """Work that is left of each batch of this model: more servers of another model would not end it sooner."""
    t, b = batch_chunks.c, batches.c
    sums = sa.func.sum(t.compute_s), sa.func.sum(t.memory_s)
    running = (b.status == BatchStatus.IN_PROGRESS, b.outcome.is_(None), b.model_fingerprint == fingerprint)
    query = sa.select(b.expires_at, *sums).join_from(batch_chunks, batches, t.batch_id == b.id).where(*running)
    found = conn.execute(query.group_by(b.id, b.expires_at).order_by(b.expires_at, b.id))
    return [JobLeft(expires_at, max(compute_s, memory_s)) for expires_at, compute_s, memory_s in found]


def lease_chunks(
    conn: sa.Connection,
    side: Side,
    now_ms: Milliseconds,
    limit: int = 1,
    server: LeasingServer | None = None,
    excluded: Excluded = NOTHING,
    owner: str | None = None,
) -> list[ChunkLease]:
    """Leases the next chunks that no server holds, or whose lease is over.

    It skips chunks that another server is leasing in a transaction of its own.

    Args:
        server: only chunks that it may run, for its lease and in its name; None for any chunk.
        owner: only chunks of this owner's batches.
    """
    t = batch_chunks.c
    density = t.density.desc() if side is Side.COMPUTE_BOUND else t.density.asc()
    free = sa.select(t.batch_id, t.chunk_no).where(t.leased_until_ms <= now_ms)
    if server is not None:
        free = free.where(_for(server, excluded))
    if owner is not None:
        free = free.where(t.batch_id.in_(sa.select(batches.c.id).where(batches.c.owner == owner)))
    # As ``sort_key``.
    free = free.order_by(t.deadline_class, density, t.batch_id, t.chunk_no).limit(limit)
    # A CTE is evaluated once; with a subquery PostgreSQL may lock more records than the limit.
    chosen = free.with_for_update(skip_locked=True).cte("chosen")
    leased = (
        batch_chunks.update()
        .where(_KEY.in_(sa.select(chosen.c.batch_id, chosen.c.chunk_no)))
        .values(
            epoch=t.epoch + 1,
            leased_until_ms=now_ms + (_LEASE_MS if server is None else server.lease_ms),
            holder=None if server is None else server.name,
        )
        .returning(t.deadline_class, t.density, t.batch_id, t.chunk_no, t.epoch)
    )
    found = [(row[0], row[1], ChunkLease(ChunkKey(row[2], row[3]), row[4])) for row in conn.execute(leased)]
    found.sort(key=lambda row: sort_key(row[0], row[1], row[2].key, side))
    return [lease for _, _, lease in found]


def renew_leases(
    conn: sa.Connection, leases: Iterable[ChunkLease], now_ms: Milliseconds, lease_ms: int = _LEASE_MS
) -> set[ChunkLease]:
    """Begins leases anew; returns those that still hold."""
    return _change(conn, leases, now_ms + lease_ms)


def release_leases(conn: sa.Connection, leases: Iterable[ChunkLease]) -> set[ChunkLease]:
    """Gives chunks back before their time; returns those that still held."""
    return _change(conn, leases, 0)


def _change(conn: sa.Connection, leases: Iterable[ChunkLease], leased_until_ms: Milliseconds) -> set[ChunkLease]:
    t = batch_chunks.c
    wanted = sorted((lease.key.batch_id, lease.key.chunk_no, lease.epoch) for lease in leases)
    if not wanted:
        return set()
    update = batch_chunks.update().where(sa.tuple_(t.batch_id, t.chunk_no, t.epoch).in_(wanted))
    changed = conn.execute(update.values(leased_until_ms=leased_until_ms).returning(t.batch_id, t.chunk_no, t.epoch))
    return {ChunkLease(ChunkKey(batch_id, chunk_no), epoch) for batch_id, chunk_no, epoch in changed}


def complete_chunk(conn: sa.Connection, lease: ChunkLease) -> bool:
    """Removes a chunk if the lease holds and none of its lines is left; its epochs end with it."""
    t, lines = batch_chunks.c, batch_lines.c
    left = sa.exists().where(
        lines.batch_id == lease.key.batch_id, lines.chunk_no == lease.key.chunk_no, lines.state == LineState.PENDING
    )
    where = (t.batch_id == lease.key.batch_id, t.chunk_no == lease.key.chunk_no, t.epoch == lease.epoch, ~left)
    return conn.execute(batch_chunks.delete().where(*where)).rowcount == 1


def num_chunks(conn: sa.Connection, batch_id: str) -> int:
    """Chunks of a batch that have lines left."""
    query = sa.select(sa.func.count()).select_from(batch_chunks).where(batch_chunks.c.batch_id == batch_id)
    return int(conn.execute(query).scalar_one())


class LeasedLines:
    """Lease of this server on the lines of a chunk. Implements ``LineLease``."""

    def __init__(self, lease: ChunkLease) -> None:
        self._lease = lease

    @property
    def job_id(self) -> str:
        """As in ``LineLease``."""
        batch_id, chunk_no = self._lease.key
        return f"{batch_id}.{chunk_no}.{self._lease.epoch}"

    def condition(self) -> sa.ColumnElement[bool]:
        """As in ``LineLease``: the lock keeps other leases of the chunk out until the results are durable."""
        held = sa.select(batch_chunks.c.chunk_no).where(*self._where()).with_for_update(read=True).cte("held")
        return batch_lines.c.chunk_no.in_(sa.select(held.c.chunk_no))

    def holds(self, conn: sa.Connection) -> bool:
        return bool(conn.execute(sa.select(sa.exists().where(*self._where()))).scalar_one())

    def _where(self) -> tuple[sa.ColumnElement[bool], ...]:
        t, (batch_id, chunk_no) = batch_chunks.c, self._lease.key
        return t.batch_id == batch_id, t.chunk_no == chunk_no, t.epoch == self._lease.epoch
