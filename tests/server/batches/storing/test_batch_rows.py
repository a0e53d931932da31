"""Guards of single operations on rows, each where its absence would show."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.storing import batch_rows, file_rows
from neaptide.server.batches.storing.models import (
    BatchStatus,
    FileRecord,
    IdempotencyKey,
    LineResult,
    LineState,
    NewBatch,
    NewLine,
    StoredUsage,
)
from neaptide.server.batches.storing.store import Store

FILE = FileRecord("file-1", "", "a.jsonl", "batch", 3, "0" * 64, 100, None)
BATCH = NewBatch("batch_1", "", "", "/v1/chat/completions", "file-1", "24h", None, None, 100, 200)


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> Iterator[Store]:
    """A store with one running batch of two lines."""
    store = Store(tmp_path, sharing_of(store_url))
    store.open()
    store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
    store.write_blocking(batch_rows.insert_lines, BATCH.id, [NewLine(n, f"c{n}", 0, 1, n - 1, 1) for n in (1, 2)])
    assert store.write_blocking(batch_rows.begin_batch, BATCH.id, "m", "fingerprint", 101)
    yield store
    store.close()


def result(line_no: int, body: str = "{}") -> LineResult:
    return LineResult(line_no, LineState.COMPLETED, 200, "req_1", body, StoredUsage(3, 1, 2))


def test_another_owners_file_has_no_purpose(store: Store) -> None:
    store.write_blocking(file_rows.insert_file, replace(FILE, owner="a", purpose="user_data"))
    assert store.read_blocking(file_rows.select_purpose, FILE.id, "a") == ("user_data", None)
    assert store.read_blocking(file_rows.select_purpose, FILE.id, "b") == (None, None)
    with pytest.raises(batch_rows.WrongPurposeError):
        store.write_blocking(batch_rows.create_batch, replace(BATCH, id="batch_2", owner="a"), ("file-2", "file-3"))
    # As if there were no such file: the batch of another owner fails when it is validated.
    assert store.write_blocking(batch_rows.create_batch, replace(BATCH, id="batch_3", owner="b"), ("file-4", "file-5"))


def test_a_line_that_ends_twice_in_one_write_counts_once(store: Store) -> None:
    assert store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1, '"first"'), result(1, '"second"')]) == 1
    assert store.read_blocking(batch_rows.ended_lines, BATCH.id, 0, 10)[0].result == '"first"'
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert (record.num_completed, record.input_tokens) == (1, 3)


def test_deaths_are_noted_on_pending_lines_only(store: Store) -> None:
    store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1)])
    store.write_blocking(batch_rows.count_attempts, BATCH.id, [1, 2])
    query = sa.text("select attempts from batch_lines order by line_no")
    assert store.read_blocking(lambda conn: list(conn.execute(query).scalars())) == [0, 1]
    assert [line.attempts for line in store.read_blocking(batch_rows.pending_lines, BATCH.id)] == [1]


def test_an_overdue_batch_can_no_longer_be_cancelled(store: Store) -> None:
    assert store.write_blocking(batch_rows.expire_overdue, 300) == [BATCH.id]
    assert not store.write_blocking(batch_rows.request_cancel, BATCH.id, 301)
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert (record.status, record.outcome, record.cancelling_at) == ("in_progress", "expired", None)


@pytest.mark.parametrize("status", [BatchStatus.FINALIZING, BatchStatus.COMPLETED, BatchStatus.FAILED])
def test_a_batch_past_running_can_no_longer_be_cancelled(store: Store, status: BatchStatus) -> None:
    store.write_blocking(lambda conn: conn.exec_driver_sql(f"update batches set status = '{status}'").close())
    assert not store.write_blocking(batch_rows.request_cancel, BATCH.id, 150)
    assert store.read_blocking(batch_rows.require_batch, BATCH.id).status is status


def test_an_overdue_batch_does_not_complete(store: Store) -> None:
    store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1), result(2)])
    assert store.write_blocking(batch_rows.expire_overdue, 300) == [BATCH.id]
    assert not store.write_blocking(batch_rows.begin_finalizing, BATCH.id, 301)
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert (record.status, record.outcome) == ("in_progress", "expired")


@pytest.mark.parametrize("status", [BatchStatus.VALIDATING, BatchStatus.FAILED, BatchStatus.COMPLETED])
def test_only_a_running_batch_completes(store: Store, status: BatchStatus) -> None:
    store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1), result(2)])
    store.write_blocking(lambda conn: conn.exec_driver_sql(f"update batches set status = '{status}'").close())
    assert not store.write_blocking(batch_rows.begin_finalizing, BATCH.id, 150)


def test_the_key_of_a_deleted_file_stands_for_its_successor(store: Store) -> None:
    key = IdempotencyKey("", "files", "key", "hash")
    other = IdempotencyKey("", "files", "other", "hash")

    def insert(file_id: str, key: IdempotencyKey = key) -> str:
        return store.write_blocking(file_rows.insert_file, replace(FILE, id=file_id), key).id

    assert (insert("file-a"), insert("file-b", other)) == ("file-a", "file-b")
    assert store.write_blocking(file_rows.delete_file, "file-a", "", 101)
    assert (insert("file-c"), insert("file-d")) == ("file-c", "file-c")
    assert insert("file-e", other) == "file-b"
    assert store.read_blocking(file_rows.all_file_ids) == {"file-b", "file-c"}
