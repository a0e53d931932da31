"""Leases of whole batches, on both databases: who may move one on, and that nobody else writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from neaptide.cluster.batches import chunk_rows, lease_rows
from neaptide.cluster.batches.chunk_rows import LeasedLines
from neaptide.cluster.batches.lease_rows import HeldBatchLease, guarded
from neaptide.cluster.lease_order import ChunkKey, LeaseChunk
from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.sharing import LeaseLostError
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.database_clock import database_now_ms
from neaptide.server.batches.storing.models import LineResult, LineState, NewBatch, NewLine
from neaptide.server.batches.storing.store import Store

LEASE_MS = 10_000


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> Iterator[Store]:
    store = Store(tmp_path, sharing_of(store_url))
    store.open()
    for name in ("batch_1", "batch_2"):
        new = NewBatch(name, "", "", "/v1/chat/completions", "file-1", "24h", None, None, 100, 1_000)
        store.write_blocking(batch_rows.create_batch, new, (f"file-o{name}", f"file-e{name}"))
    yield store
    store.close()


def leased(store: Store, now_ms: int) -> HeldBatchLease | None:
    return store.write_blocking(lease_rows.lease_batch, LEASE_MS, now_ms)


def begin(store: Store, batch_id: str) -> None:
    """With one line, that is for leases."""
    store.write_blocking(batch_rows.insert_lines, batch_id, [NewLine(1, "c0", 0, 1, 0, 1)])
    assert store.write_blocking(batch_rows.begin_batch, batch_id, "m", "fingerprint", 101)
    store.write_blocking(chunk_rows.add_chunks, {LeaseChunk(ChunkKey(batch_id, 0), 1_000, 1.0, 1): [1]})


def test_each_batch_is_leased_once_while_its_lease_lasts(store: Store) -> None:
    assert [leased(store, 5) for _ in range(3)] == [HeldBatchLease("batch_1", 1), HeldBatchLease("batch_2", 1), None]
    excluded = store.write_blocking(lease_rows.lease_batch, LEASE_MS, 5 + LEASE_MS, excluded=["batch_1"])
    assert excluded == HeldBatchLease("batch_2", 2)
    assert leased(store, 5 + LEASE_MS) == HeldBatchLease("batch_1", 2)


def test_a_lease_is_renewed_and_released_by_its_holder_only(store: Store) -> None:
    old, new = leased(store, 0), None
    assert old is not None
    store.write_blocking(lease_rows.renew_batches, [old], LEASE_MS, LEASE_MS - 1)
    assert leased(store, LEASE_MS) == HeldBatchLease("batch_2", 1)
    assert leased(store, LEASE_MS) is None
    new = leased(store, 2 * LEASE_MS)
    assert new == HeldBatchLease("batch_1", 2)
    assert store.write_blocking(lease_rows.renew_batches, [old, new], LEASE_MS, 2 * LEASE_MS) == {new: False}
    store.write_blocking(lease_rows.release_batch, old)
    assert leased(store, 2 * LEASE_MS) == HeldBatchLease("batch_2", 2)
    store.write_blocking(lease_rows.release_batch, new)
    assert leased(store, 2 * LEASE_MS) == HeldBatchLease("batch_1", 3)


def test_a_renewal_tells_that_the_end_is_decided(store: Store) -> None:
    lease = leased(store, 0)
    assert lease is not None
    assert store.write_blocking(batch_rows.request_cancel, lease.batch_id, 200)
    assert store.write_blocking(lease_rows.renew_batches, [lease], LEASE_MS, 1) == {lease: True}


def test_what_the_former_holder_writes_is_undone(store: Store) -> None:
    old, _, new = leased(store, 0), leased(store, 0), leased(store, LEASE_MS)
    assert old is not None
    assert new is not None
    line = [NewLine(1, "c0", 0, 1, 0, 1)]
    with pytest.raises(LeaseLostError):
        store.write_blocking(guarded(old, batch_rows.insert_lines), old.batch_id, line)
    assert store.read_blocking(batch_rows.pending_lines, old.batch_id) == []
    store.write_blocking(guarded(new, batch_rows.insert_lines), new.batch_id, line)
    assert len(store.read_blocking(batch_rows.pending_lines, new.batch_id)) == 1


def test_a_running_batch_needs_no_care_before_its_last_chunk_is_done(store: Store) -> None:
    for batch_id in ("batch_1", "batch_2"):
        begin(store, batch_id)
    assert leased(store, 0) is None
    result = [LineResult(1, LineState.COMPLETED, 200, "req", "{}")]
    (chunk, _) = store.write_blocking(chunk_rows.lease_chunks, chunk_rows.Side.COMPUTE_BOUND, 0, 2)
    assert store.write_blocking(batch_rows.end_leased_lines, chunk.key.batch_id, LeasedLines(chunk), result)
    assert leased(store, 0) is None
    assert store.write_blocking(chunk_rows.complete_chunk, chunk)
    assert leased(store, 0) == HeldBatchLease("batch_1", 1)
    assert store.write_blocking(batch_rows.request_cancel, "batch_2", 200)
    assert leased(store, 0) == HeldBatchLease("batch_2", 1)


def test_an_ended_batch_needs_none_and_has_no_chunks(store: Store) -> None:
    begin(store, "batch_1")
    assert store.write_blocking(batch_rows.request_cancel, "batch_1", 200)
    (chunk,) = store.write_blocking(chunk_rows.lease_chunks, chunk_rows.Side.COMPUTE_BOUND, 0)
    store.write_blocking(batch_rows.close_lines, "batch_1", LineState.CANCELLED, "{}")
    late = [LineResult(1, LineState.COMPLETED, 200, "req", "{}")]
    assert not store.write_blocking(batch_rows.end_leased_lines, chunk.key.batch_id, LeasedLines(chunk), late)
    assert store.write_blocking(batch_rows.finish_batch, "batch_1", None, None, 300)
    record = store.read_blocking(batch_rows.require_batch, "batch_1")
    assert (record.status, record.num_completed, record.num_failed) == ("cancelled", 0, 0)
    assert leased(store, 0) == HeldBatchLease("batch_2", 1)


def test_the_databases_clock_decides(store: Store) -> None:
    """Nobody says what time it is: a lease that has just begun lasts."""
    first = store.write_blocking(lease_rows.lease_batch, LEASE_MS)
    assert store.write_blocking(lease_rows.lease_batch, 0) == HeldBatchLease("batch_2", 1)
    # A lease of no length is over at once.
    assert store.write_blocking(lease_rows.lease_batch, LEASE_MS) == HeldBatchLease("batch_2", 2)
    assert store.write_blocking(lease_rows.lease_batch, LEASE_MS) is None
    assert first == HeldBatchLease("batch_1", 1)
    now_ms = store.read_blocking(lambda conn: conn.execute(sa.select(database_now_ms(conn))).scalar_one())
    assert now_ms > 1_700_000_000_000
