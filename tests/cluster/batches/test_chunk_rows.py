"""Leases of chunks in the database, on SQLite and PostgreSQL: their order, and which results count."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings

from neaptide.cluster.batches import chunk_rows
from neaptide.cluster.batches.chunk_rows import LeasedLines
from neaptide.cluster.lease_order import LEASE_S, ChunkKey, ChunkLease, LeaseChunk, Side, sort_key
from neaptide.cluster.sharing import sharing_of
from neaptide.cluster.storage.postgres import postgres_url as make_postgres_url
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import LineResult, LineState, NewBatch, NewLine
from neaptide.server.batches.storing.store import Store
from neaptide.server.batches.storing.tables import batch_chunks

BATCH = NewBatch("batch_1", "", "", "/v1/chat/completions", "file-1", "24h", None, None, 100, 1_000)
LEASE_MS = int(LEASE_S * 1000)
NUM_CHUNKS, CHUNK_LINES = 3, 2
CHUNKS = [LeaseChunk(ChunkKey(BATCH.id, n), 1_000 if n else 100_000, float(n), CHUNK_LINES) for n in range(NUM_CHUNKS)]
"""The first one is not urgent."""


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> Iterator[Store]:
    store = Store(tmp_path, sharing_of(store_url))
    store.open()
    yield store
    store.close()


def lines_of(chunk_no: int) -> list[int]:
    return list(range(1 + chunk_no * CHUNK_LINES, 1 + (chunk_no + 1) * CHUNK_LINES))


def begin(store: Store) -> None:
    """One running batch whose lines may be leased, and nothing else."""
    store.write_blocking(lambda conn: conn.execute(batch_rows.batches.delete()).close())
    store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
    lines = [NewLine(n + 1, f"c{n}", 0, 1, n, 1) for n in range(NUM_CHUNKS * CHUNK_LINES)]
    store.write_blocking(batch_rows.insert_lines, BATCH.id, lines)
    assert store.write_blocking(batch_rows.begin_batch, BATCH.id, "m", "fingerprint", 101)
    chunks = {chunk: lines_of(chunk.key.chunk_no) for chunk in CHUNKS}
    store.write_blocking(chunk_rows.add_chunks, chunks)


def end_lines(store: Store, lease: ChunkLease, body: str = "{}") -> int:
    """The results of a whole chunk under a lease."""
    results = [LineResult(n, LineState.COMPLETED, 200, "req", body) for n in lines_of(lease.key.chunk_no)]
    return store.write_blocking(batch_rows.end_lines, BATCH.id, results, LeasedLines(lease).condition())


def test_a_server_is_offered_no_chunk_that_its_context_does_not_hold(store: Store) -> None:
    begin(store)
    needs = sa.update(batch_chunks).values(needs_tokens=batch_chunks.c.chunk_no * 100)
    store.write_blocking(lambda conn: conn.execute(needs).close())
    server = chunk_rows.LeasingServer("short", "fingerprint", max_model_len=100)
    assert store.read_blocking(chunk_rows.free_chunks, server).num_free == NUM_CHUNKS - 1
    leases = store.write_blocking(chunk_rows.lease_chunks, Side.COMPUTE_BOUND, 0, 9, server)
    assert sorted(lease.key.chunk_no for lease in leases) == [0, 1]


def test_a_zombies_late_results_change_nothing(store: Store) -> None:
    begin(store)
    (zombie,) = store.write_blocking(chunk_rows.lease_chunks, Side.COMPUTE_BOUND, 0)
    (successor,) = store.write_blocking(chunk_rows.lease_chunks, Side.COMPUTE_BOUND, LEASE_MS)
    assert (zombie.key, zombie.epoch + 1) == (successor.key, successor.epoch)
    assert end_lines(store, zombie, '"late"') == 0
    assert end_lines(store, successor) == CHUNK_LINES
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert record.num_completed == CHUNK_LINES
    ended = store.read_blocking(batch_rows.ended_lines, BATCH.id, 0, 99)
    assert {line.result for line in ended if line.state is LineState.COMPLETED} == {"{}"}


def test_the_backlog_is_what_is_left_of_each_batch_that_runs_and_that_servers_of_a_model_may_run(store: Store) -> None:
    begin(store)
    assert store.read_blocking(chunk_rows.backlog, "fingerprint") == [(1_000, 0.0)]
    assert store.read_blocking(chunk_rows.backlog, "another") == []
    store.write_blocking(batch_rows.withdraw_chunks, BATCH.id)
    assert store.read_blocking(chunk_rows.backlog, "fingerprint") == []
    chunks = [LeaseChunk(ChunkKey(BATCH.id, n), 1_000, 1.0, CHUNK_LINES, n + 1.0, 1.5) for n in range(NUM_CHUNKS)]
    store.write_blocking(chunk_rows.add_chunks, {chunk: lines_of(chunk.key.chunk_no) for chunk in chunks})
    assert store.read_blocking(chunk_rows.backlog, "fingerprint") == [(1_000, 6.0)]  # compute weighs most: 1 + 2 + 3
    leases = store.write_blocking(chunk_rows.lease_chunks, Side.COMPUTE_BOUND, 0, NUM_CHUNKS)
    (last,) = (lease for lease in leases if lease.key.chunk_no == 2)
    end_lines(store, last)
    assert store.write_blocking(chunk_rows.complete_chunk, last)
    assert store.read_blocking(chunk_rows.backlog, "fingerprint") == [(1_000, 3.0)]


def test_a_chunk_with_lines_left_is_not_complete(store: Store) -> None:
    begin(store)
    (lease,) = store.write_blocking(chunk_rows.lease_chunks, Side.COMPUTE_BOUND, 0)
    assert not store.write_blocking(chunk_rows.complete_chunk, lease)
    assert end_lines(store, lease) == CHUNK_LINES
    assert store.write_blocking(chunk_rows.complete_chunk, lease)
    assert end_lines(store, lease) == 0


def test_results_of_a_batch_that_was_withdrawn_are_refused(store: Store) -> None:
    begin(store)
    (lease,) = store.write_blocking(chunk_rows.lease_chunks, Side.COMPUTE_BOUND, 0)
    store.write_blocking(batch_rows.withdraw_chunks, BATCH.id)
    assert end_lines(store, lease) == 0


def test_the_lines_of_a_chunk_are_found_without_the_batchs_others(postgres_url: str, tmp_path: Path) -> None:
    """A lease takes as long in a batch of 50,000 lines as in one of 500. By the database's plan, at 32 chunks of 64."""
    store = Store(tmp_path, sharing_of(postgres_url))
    store.open()
    asked: list[tuple[str, Any]] = []

    def note(conn: sa.Connection, cursor: object, statement: str, parameters: Any, *_: object) -> None:
        asked.append((statement, parameters))

    def plan(conn: sa.Connection) -> str:
        conn.exec_driver_sql("ANALYZE batch_lines")
        sa.event.listen(conn, "before_cursor_execute", note)
        assert len(batch_rows.pending_lines(conn, BATCH.id, 7)) == 64
        sa.event.remove(conn, "before_cursor_execute", note)
        ((statement, parameters),) = asked
        return str(conn.exec_driver_sql(f"EXPLAIN {statement}", parameters).all())

    try:
        store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
        lines = [NewLine(n + 1, f"c{n}", 0, 1, n, 1) for n in range(32 * 64)]
        store.write_blocking(batch_rows.insert_lines, BATCH.id, lines)
        chunks = {
            LeaseChunk(ChunkKey(BATCH.id, n), 1_000, 1.0, 64): list(range(1 + n * 64, 65 + n * 64)) for n in range(32)
        }
        store.write_blocking(chunk_rows.add_chunks, chunks)
        assert "batch_lines_by_chunk" in store.write_blocking(plan)
    finally:
        store.close()


def test_the_lines_of_many_chunks_are_offered_by_one_statement(postgres_url: str, tmp_path: Path) -> None:
    """One for each chunk would read the whole batch each time, as long as there are no statistics of it."""
    chunks = {LeaseChunk(ChunkKey(BATCH.id, n), 1_000, 1.0, 1): [2 * n + 1, 2 * n + 2] for n in range(200)}
    lines = [NewLine(n + 1, f"c{n}", 0, 1, n, 1) for n in range(402)]

    def offer(conn: sa.Connection) -> list[str]:
        statements: list[str] = []
        sa.event.listen(conn, "before_cursor_execute", lambda *call: statements.append(call[2].split()[0]))
        chunk_rows.add_chunks(conn, chunks)
        return list(statements)

    store = Store(tmp_path, sharing_of(postgres_url))
    store.open()
    try:
        store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
        store.write_blocking(batch_rows.insert_lines, BATCH.id, lines)
        assert store.write_blocking(offer).count("UPDATE") == 1
        query = sa.select(batch_rows.batch_lines.c.line_no, batch_rows.batch_lines.c.chunk_no)
        placed = dict(store.read_blocking(lambda conn: [tuple(row) for row in conn.execute(query)]))
    finally:
        store.close()
    wanted = {line_no: chunk.key.chunk_no for chunk, line_nos in chunks.items() for line_no in line_nos}
    assert placed == wanted | {401: None, 402: None}


def test_a_lease_passes_by_a_chunk_whose_results_are_being_written(postgres_url: str, tmp_path: Path) -> None:
    """Its lease is over, but its results come first: the lines that end now do not run again."""
    store = Store(tmp_path, sharing_of(postgres_url))
    store.open()
    begin(store)
    engine = sa.create_engine(make_postgres_url(postgres_url))
    try:
        writing, *others = store.write_blocking(chunk_rows.lease_chunks, Side.COMPUTE_BOUND, 0, NUM_CHUNKS)
        with engine.connect() as writer, engine.connect() as taker:
            results = [LineResult(n, LineState.COMPLETED, 200, "req", "{}") for n in lines_of(writing.key.chunk_no)]
            ended = batch_rows.end_lines(writer, BATCH.id, results, LeasedLines(writing).condition())
            leased = chunk_rows.lease_chunks(taker, Side.COMPUTE_BOUND, LEASE_MS, NUM_CHUNKS)
            writer.commit()
            taker.commit()
        assert ended == CHUNK_LINES
        assert leased == [ChunkLease(lease.key, 2) for lease in others]
    finally:
        engine.dispose()
        store.close()


class Pair:
    """The leases in the database, and what they should be."""

    def __init__(self, store: Store) -> None:
        begin(store)
        self._store = store
        self._left = {chunk.key: chunk for chunk in CHUNKS}
        self._epochs = dict.fromkeys(self._left, 0)
        self._leased_until_s = dict.fromkeys(self._left, 0)
        self._now_s = 0
        self.leases: list[ChunkLease] = []
        self.num_ended = 0

    def lease(self, side: Side, limit: int, wait_s: int) -> None:
        self._now_s += wait_s
        free = [chunk for chunk in self._left.values() if self._leased_until_s[chunk.key] <= self._now_s]
        free.sort(key=lambda chunk: sort_key(chunk.deadline_class, chunk.density, chunk.key, side))
        expected = [ChunkLease(chunk.key, self._epochs[chunk.key] + 1) for chunk in free[:limit]]
        assert self._store.write_blocking(chunk_rows.lease_chunks, side, self._now_s * 1000, limit) == expected
        for key, epoch in expected:
            self._epochs[key], self._leased_until_s[key] = epoch, self._now_s + int(LEASE_S)
        self.leases += expected

    def _holds(self, lease: ChunkLease) -> bool:
        return lease.key in self._left and self._epochs[lease.key] == lease.epoch

    def renew(self, lease: ChunkLease) -> None:
        expected = {lease} if self._holds(lease) else set()
        assert self._store.write_blocking(chunk_rows.renew_leases, [lease], self._now_s * 1000) == expected
        if expected:
            self._leased_until_s[lease.key] = self._now_s + int(LEASE_S)

    def release(self, lease: ChunkLease) -> None:
        expected = {lease} if self._holds(lease) else set()
        assert self._store.write_blocking(chunk_rows.release_leases, [lease]) == expected
        if expected:
            self._leased_until_s[lease.key] = 0

    def end(self, lease: ChunkLease) -> None:
        """All of a chunk's lines, once or never."""
        holds = self._holds(lease)
        assert end_lines(self._store, lease) == (CHUNK_LINES if holds else 0)
        assert self._store.write_blocking(chunk_rows.complete_chunk, lease) == holds
        if holds:
            del self._left[lease.key]
            self.num_ended += CHUNK_LINES
        record = self._store.read_blocking(batch_rows.require_batch, BATCH.id)
        assert record.num_completed == self.num_ended


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "lease", "renew", "release", "end"]),
        st.sampled_from(Side),
        st.integers(1, 2),
        st.sampled_from([0, 5, 14, 15, 40]),
    ),
    min_size=5,
    max_size=20,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_the_database_keeps_leases_as_they_should_be(store: Store, steps: list[tuple[str, Side, int, int]]) -> None:
    pair = Pair(store)
    for action, side, number, wait_s in steps:
        if action == "lease":
            pair.lease(side, number, wait_s)
        elif pair.leases:
            getattr(pair, action)(pair.leases[-min(number, len(pair.leases))])
