"""Claims in the database: the same board as in memory, on both databases, and the fence around results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings

from neaptide.cluster.batches import chunk_rows
from neaptide.cluster.batches.chunk_rows import LeasedLines
from neaptide.cluster.lease_order import LEASE_S, Board, Chunk, ChunkKey, Claim, End
from neaptide.cluster.sharing import sharing_of
from neaptide.cluster.storage.postgres import postgres_url as make_postgres_url
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import LineResult, LineState, NewBatch, NewLine
from neaptide.server.batches.storing.store import Store
from neaptide.server.batches.storing.tables import batch_chunks

BATCH = NewBatch("batch_1", "", "", "/v1/chat/completions", "file-1", "24h", None, None, 100, 1_000)
LEASE_MS = int(LEASE_S * 1000)
NUM_CHUNKS, CHUNK_LINES = 3, 2
CHUNKS = [Chunk(ChunkKey(BATCH.id, n), 1_000 if n else 100_000, float(n), CHUNK_LINES) for n in range(NUM_CHUNKS)]
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
    """One running batch whose lines may be claimed, and nothing else."""
    store.write_blocking(lambda conn: conn.execute(batch_rows.batches.delete()).close())
    store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
    lines = [NewLine(n + 1, f"c{n}", 0, 1, n, 1) for n in range(NUM_CHUNKS * CHUNK_LINES)]
    store.write_blocking(batch_rows.insert_lines, BATCH.id, lines)
    assert store.write_blocking(batch_rows.begin_batch, BATCH.id, "m", "fingerprint", 101)
    chunks = {chunk: lines_of(chunk.key.chunk_no) for chunk in CHUNKS}
    store.write_blocking(chunk_rows.add_chunks, chunks)


def end_lines(store: Store, claim: Claim, body: str = "{}") -> int:
    """The results of a whole chunk under a claim."""
    results = [LineResult(n, LineState.COMPLETED, 200, "req", body) for n in lines_of(claim.key.chunk_no)]
    return store.write_blocking(batch_rows.end_lines, BATCH.id, results, LeasedLines(claim).condition())


def test_a_server_is_offered_no_chunk_that_its_context_does_not_hold(store: Store) -> None:
    begin(store)
    needs = sa.update(batch_chunks).values(needs_tokens=batch_chunks.c.chunk_no * 100)
    store.write_blocking(lambda conn: conn.execute(needs).close())
    claimant = chunk_rows.Claimant("short", "fingerprint", max_model_len=100)
    assert store.read_blocking(chunk_rows.board_figures, claimant).num_free == NUM_CHUNKS - 1
    claims = store.write_blocking(chunk_rows.claim_chunks, End.DENSE, 0, 9, claimant)
    assert sorted(claim.key.chunk_no for claim in claims) == [0, 1]


def test_a_zombies_late_results_change_nothing(store: Store) -> None:
    begin(store)
    (zombie,) = store.write_blocking(chunk_rows.claim_chunks, End.DENSE, 0)
    (successor,) = store.write_blocking(chunk_rows.claim_chunks, End.DENSE, LEASE_MS)
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
    chunks = [Chunk(ChunkKey(BATCH.id, n), 1_000, 1.0, CHUNK_LINES, n + 1.0, 1.5) for n in range(NUM_CHUNKS)]
    store.write_blocking(chunk_rows.add_chunks, {chunk: lines_of(chunk.key.chunk_no) for chunk in chunks})
    assert store.read_blocking(chunk_rows.backlog, "fingerprint") == [(1_000, 6.0)]  # compute weighs most: 1 + 2 + 3
    claims = store.write_blocking(chunk_rows.claim_chunks, End.DENSE, 0, NUM_CHUNKS)
    (last,) = (claim for claim in claims if claim.key.chunk_no == 2)
    end_lines(store, last)
    assert store.write_blocking(chunk_rows.complete_chunk, last)
    assert store.read_blocking(chunk_rows.backlog, "fingerprint") == [(1_000, 3.0)]


def test_a_chunk_with_lines_left_is_not_complete(store: Store) -> None:
    begin(store)
    (claim,) = store.write_blocking(chunk_rows.claim_chunks, End.DENSE, 0)
    assert not store.write_blocking(chunk_rows.complete_chunk, claim)
    assert end_lines(store, claim) == CHUNK_LINES
    assert store.write_blocking(chunk_rows.complete_chunk, claim)
    assert end_lines(store, claim) == 0


def test_results_of_a_batch_that_was_withdrawn_are_refused(store: Store) -> None:
    begin(store)
    (claim,) = store.write_blocking(chunk_rows.claim_chunks, End.DENSE, 0)
    store.write_blocking(batch_rows.withdraw_chunks, BATCH.id)
    assert end_lines(store, claim) == 0


def test_the_lines_of_a_chunk_are_found_without_the_batchs_others(postgres_url: str, tmp_path: Path) -> None:
    """A claim takes as long in a batch of 50,000 lines as in one of 500. By the database's plan, at 32 chunks of 64."""
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
        chunks = {Chunk(ChunkKey(BATCH.id, n), 1_000, 1.0, 64): list(range(1 + n * 64, 65 + n * 64)) for n in range(32)}
        store.write_blocking(chunk_rows.add_chunks, chunks)
        assert "batch_lines_by_chunk" in store.write_blocking(plan)
    finally:
        store.close()


def test_the_lines_of_many_chunks_are_offered_by_one_statement(postgres_url: str, tmp_path: Path) -> None:
    """One for each chunk would read the whole batch each time, as long as there are no statistics of it."""
    chunks = {Chunk(ChunkKey(BATCH.id, n), 1_000, 1.0, 1): [2 * n + 1, 2 * n + 2] for n in range(200)}
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


def test_a_claim_passes_by_a_chunk_whose_results_are_being_written(postgres_url: str, tmp_path: Path) -> None:
    """Its lease is over, but its results come first: the lines that end now do not run again."""
    store = Store(tmp_path, sharing_of(postgres_url))
    store.open()
    begin(store)
    engine = sa.create_engine(make_postgres_url(postgres_url))
    try:
        writing, *others = store.write_blocking(chunk_rows.claim_chunks, End.DENSE, 0, NUM_CHUNKS)
        with engine.connect() as writer, engine.connect() as claimer:
            results = [LineResult(n, LineState.COMPLETED, 200, "req", "{}") for n in lines_of(writing.key.chunk_no)]
            ended = batch_rows.end_lines(writer, BATCH.id, results, LeasedLines(writing).condition())
            claimed = chunk_rows.claim_chunks(claimer, End.DENSE, LEASE_MS, NUM_CHUNKS)
            writer.commit()
            claimer.commit()
        assert ended == CHUNK_LINES
        assert claimed == [Claim(claim.key, 2) for claim in others]
    finally:
        engine.dispose()
        store.close()


class Pair:
    """The board in memory and the one in the database, told the same."""

    def __init__(self, store: Store) -> None:
        begin(store)
        self._store, self._board = store, Board()
        self._board.add(CHUNKS)
        self._now_s = 0
        self.claims: list[Claim] = []
        self.num_ended = 0

    def claim(self, end: End, limit: int, wait_s: int) -> None:
        self._now_s += wait_s
        expected = self._board.claim(end, self._now_s, limit)
        assert self._store.write_blocking(chunk_rows.claim_chunks, end, self._now_s * 1000, limit) == expected
        self.claims += expected

    def renew(self, claim: Claim) -> None:
        expected = self._board.renew(claim, self._now_s)
        found = self._store.write_blocking(chunk_rows.renew_claims, [claim], self._now_s * 1000)
        assert found == ({claim} if expected else set())

    def release(self, claim: Claim) -> None:
        expected = self._board.release(claim)
        assert self._store.write_blocking(chunk_rows.release_claims, [claim]) == ({claim} if expected else set())

    def end(self, claim: Claim) -> None:
        """All of a chunk's lines, once or never."""
        holds = self._board.holds(claim)
        assert end_lines(self._store, claim) == (CHUNK_LINES if holds else 0)
        assert self._store.write_blocking(chunk_rows.complete_chunk, claim) == self._board.complete(claim) == holds
        self.num_ended += CHUNK_LINES if holds else 0
        record = self._store.read_blocking(batch_rows.require_batch, BATCH.id)
        assert record.num_completed == self.num_ended


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "renew", "release", "end"]),
        st.sampled_from(End),
        st.integers(1, 2),
        st.sampled_from([0, 5, 14, 15, 40]),
    ),
    min_size=5,
    max_size=20,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_the_database_keeps_the_same_board(store: Store, steps: list[tuple[str, End, int, int]]) -> None:
    pair = Pair(store)
    for action, end, number, wait_s in steps:
        if action == "claim":
            pair.claim(end, number, wait_s)
        elif pair.claims:
            getattr(pair, action)(pair.claims[-min(number, len(pair.claims))])
