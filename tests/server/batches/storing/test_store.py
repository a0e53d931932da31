"""The database: durability, group commit, schema, and which process may open it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.metrics import read_overview
from neaptide.server.batches.storing import batch_rows, file_rows
from neaptide.server.batches.storing.data_dir import DATABASE_NAME, DataDirLockedError, StoreError
from neaptide.server.batches.storing.databases.writer import MAX_GROUP_ROWS
from neaptide.server.batches.storing.models import FileRecord, LineResult, LineState, NewBatch, NewLine, StoredUsage
from neaptide.server.batches.storing.store import (
    Store,
    StoreUnavailableError,
)
from neaptide.server.batches.storing.tables import batches, files, metadata
from tests.patience import PATIENCE_S

FILE = FileRecord("file-1", "", "a.jsonl", "batch", 3, "0" * 64, 100, None)
BATCH = NewBatch("batch_1", "", "", "/v1/chat/completions", "file-1", "24h", None, {"a": "b"}, 100, 200)


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> Iterator[Store]:
    store = Store(tmp_path, sharing_of(store_url), limit_s=PATIENCE_S)
    store.open()
    yield store
    store.close()


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    store.open()
    yield store
    store.close()


def add_file(conn: sa.Connection, number: int) -> int:
    file_rows.insert_file(conn, replace(FILE, id=f"file-{number}"))
    return number


def num_files(conn: sa.Connection) -> int:
    return int(conn.execute(sa.select(sa.func.count()).select_from(files)).scalar_one())


async def test_a_finished_write_is_seen_by_readers(store: Store) -> None:
    for number in range(5):
        await store.write(add_file, number)
        assert await store.read(num_files) == number + 1


def test_a_reader_that_is_late_keeps_the_store_from_closing_and_no_log_behind(tmp_path: Path) -> None:
    """Its caller may have been cancelled. A write-ahead log left behind would be applied to a restored database."""
    store = Store(tmp_path)
    store.open()
    store.write_blocking(add_file, 1)
    begun = threading.Event()

    def read_slowly(conn: sa.Connection) -> int:
        found = num_files(conn)
        begun.set()
        while store._readers is not None:
            time.sleep(0.001)
        return found

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read_blocking, read_slowly)
        assert begun.wait(PATIENCE_S)
        store.close()
        assert [path.name for path in tmp_path.iterdir() if path.name.endswith(("-wal", "-shm"))] == []
        assert reading.result() == 1


async def test_writes_that_come_together_share_commits(store: Store) -> None:
    """All come while one before them is being written."""
    before, goes_on = store.num_commits, threading.Event()
    first = asyncio.ensure_future(store.write(lambda conn: goes_on.wait(PATIENCE_S)))
    await asyncio.sleep(0)
    writes = [
        asyncio.ensure_future(store.write_grouped(lambda conn, n=n: add_file(conn, n), 1))  # type: ignore[misc]
        for n in range(256)
    ]
    await asyncio.sleep(0)
    goes_on.set()
    assert await first
    assert await asyncio.gather(*writes) == list(range(256))
    assert store.num_commits - before == 1 + 256 // MAX_GROUP_ROWS
    assert await store.read(num_files) == 256


async def test_a_lone_grouped_write_does_not_wait_for_others(store: Store) -> None:
    assert await store.write_grouped(lambda conn: add_file(conn, 1), 1) == 1


async def test_a_failing_operation_undoes_itself_alone(store: Store) -> None:
    def half(conn: sa.Connection) -> None:
        add_file(conn, 7)
        raise ValueError("halfway")

    writes = [
        store.write_grouped(lambda conn: add_file(conn, 1), 1),
        store.write_grouped(half, 1),
        store.write_grouped(lambda conn: add_file(conn, 2), 1),
    ]
    first, second, third = await asyncio.gather(*writes, return_exceptions=True)
    assert (first, third) == (1, 2)
    assert isinstance(second, ValueError)
    assert await store.read(file_rows.all_file_ids) == {"file-1", "file-2"}


async def test_readers_cannot_write(store: Store) -> None:
    with pytest.raises(StoreUnavailableError, match=r"read-?only"):
        await store.read(add_file, 1)


@pytest.mark.acceptance("A8", "database full in the middle of a group of writes")
async def test_a_full_disk_fails_the_whole_group_and_writing_goes_on_after(on_sqlite: Store) -> None:
    def limit(conn: sa.Connection, pages: int) -> None:
        conn.exec_driver_sql(f"PRAGMA max_page_count = {pages}").close()

    def much(conn: sa.Connection) -> None:
        add_file(conn, 1)
        conn.execute(files.insert(), [asdict(FILE) | {"id": f"file-much-{n}"} for n in range(2_000)])

    await on_sqlite.write(limit, 60)
    writes = [
        on_sqlite.write_grouped(lambda conn: add_file(conn, 2), 1),
        on_sqlite.write_grouped(much, 1),
        on_sqlite.write_grouped(lambda conn: add_file(conn, 3), 1),
    ]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreUnavailableError] * 3
    assert await on_sqlite.read(num_files) == 0
    await on_sqlite.write(limit, 1_000_000)
    assert await on_sqlite.write(add_file, 2) == 2
    assert await on_sqlite.read(file_rows.all_file_ids) == {"file-2"}


async def test_rows_survive_reopening_without_a_clean_close(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await asyncio.to_thread(store.open)
    await store.write(add_file, 1)
    # What is on disk now is what a kill -9 would leave.
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (DATABASE_NAME, f"{DATABASE_NAME}-wal"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    await asyncio.to_thread(store.close)
    other = Store(copy)
    await asyncio.to_thread(other.open)
    assert await other.read(num_files) == 1
    await asyncio.to_thread(other.close)


def test_the_first_migration_makes_exactly_our_tables(store: Store) -> None:
    def differences(conn: sa.Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(conn), metadata))

    assert store.read_blocking(differences) == []


def test_durability_settings(on_sqlite: Store) -> None:
    def pragmas(conn: sa.Connection) -> list[object]:
        return [conn.exec_driver_sql(f"PRAGMA {p}").scalar() for p in ("journal_mode", "synchronous", "foreign_keys")]

    assert on_sqlite.write_blocking(pragmas) == ["wal", 2, 1]


@pytest.mark.acceptance("A11", "second server on one data directory")
def test_a_second_server_is_refused(store: Store, store_url: str | None, tmp_path: Path) -> None:
    with pytest.raises(DataDirLockedError, match=r"another neaptide process \(\d+\)"):
        Store(tmp_path, sharing_of(store_url)).open()


def test_a_closed_store_can_be_opened_again(tmp_path: Path, store_url: str | None) -> None:
    for _ in range(2):
        store = Store(tmp_path, sharing_of(store_url))
        store.open()
        store.close()
        store.close()


@pytest.mark.acceptance("A10", "a database that is none")
@pytest.mark.parametrize("damage", [b"this is no database" * 1000, b"SQLite format 3\0" + b"\xff" * 8000])
def test_a_damaged_database_is_one_clear_error(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(damage)
    for _ in range(2):
        with pytest.raises(StoreError, match=DATABASE_NAME) as error:
            Store(tmp_path).open()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_database_of_a_newer_version_is_refused(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = None if kind == "sqlite" else request.getfixturevalue("postgres_url")
    store = Store(tmp_path, sharing_of(url))
    store.open()
    store.write_blocking(lambda conn: conn.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")).close())
    store.close()
    with pytest.raises(StoreError, match="newer"):
        Store(tmp_path, sharing_of(url)).open()


# ---- rows -----------------------------------------------------------------------------------------------


def result(line_no: int, body: str = "{}") -> LineResult:
    return LineResult(line_no, LineState.COMPLETED, 200, "req_1", body, StoredUsage(3, 1, 2))


def start_batch(store: Store, count: int) -> None:
    store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
    lines = [NewLine(n, f"c{n}", 0, 1, n - 1, 1) for n in range(1, count + 1)]
    store.write_blocking(batch_rows.insert_lines, BATCH.id, lines)
    assert store.write_blocking(batch_rows.begin_batch, BATCH.id, "m", "fingerprint", 101)


def test_the_first_result_of_a_line_stays(store: Store) -> None:
    start_batch(store, 3)
    assert store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1, '"first"'), result(2)]) == 2
    assert store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1, '"second"'), result(3)]) == 1
    lines = store.read_blocking(batch_rows.ended_lines, BATCH.id, 0, 10)
    assert [line.result for line in lines] == ['"first"', "{}", "{}"]
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert (record.num_total, record.num_completed, record.num_failed) == (3, 3, 0)
    assert (record.input_tokens, record.cached_tokens, record.output_tokens) == (9, 3, 6)


def test_closed_lines_refuse_late_results(store: Store) -> None:
    start_batch(store, 2)
    assert store.write_blocking(batch_rows.request_cancel, BATCH.id, 150)
    assert store.write_blocking(batch_rows.request_cancel, BATCH.id, 160), "it is what was asked for"
    assert store.write_blocking(batch_rows.close_lines, BATCH.id, LineState.CANCELLED, "{}") == 2
    assert store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1)]) == 0
    assert store.write_blocking(batch_rows.finish_batch, BATCH.id, None, None, 170)
    assert not store.write_blocking(batch_rows.finish_batch, BATCH.id, None, None, 180)
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert (record.status, record.cancelling_at, record.cancelled_at) == ("cancelled", 150, 170)


@pytest.mark.parametrize(("state", "failed"), [(LineState.CANCELLED, 0), (LineState.EXPIRED, 0), (LineState.FAILED, 2)])
def test_lines_that_never_ran_count_neither_as_completed_nor_as_failed(
    store: Store, state: LineState, failed: int
) -> None:
    start_batch(store, 3)
    store.write_blocking(batch_rows.end_lines, BATCH.id, [result(1)])
    store.write_blocking(batch_rows.close_lines, BATCH.id, state, "{}")
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert (record.num_total, record.num_completed, record.num_failed) == (3, 1, failed)


def test_no_line_is_pending_once_the_end_of_its_batch_is_decided(store: Store) -> None:
    start_batch(store, 2)
    assert store.read_blocking(read_overview).pending_requests == 2
    store.write_blocking(batch_rows.request_cancel, BATCH.id, 150)
    assert store.read_blocking(read_overview).pending_requests == 0


def test_only_legal_moves_are_taken(store: Store) -> None:
    start_batch(store, 1)
    write = store.write_blocking
    assert not write(batch_rows.fail_batch, BATCH.id, [], 102)
    assert not write(batch_rows.begin_finalizing, BATCH.id, 102)
    assert not write(batch_rows.finish_batch, BATCH.id, None, None, 102)
    write(batch_rows.end_lines, BATCH.id, [result(1)])
    assert write(batch_rows.begin_finalizing, BATCH.id, 103)
    assert not write(batch_rows.begin_batch, BATCH.id, "m", "f", 103)
    assert not write(batch_rows.request_cancel, BATCH.id, 104)
    assert write(batch_rows.expire_overdue, 10_000) == []
    assert write(batch_rows.finish_batch, BATCH.id, None, None, 105)
    assert store.read_blocking(batch_rows.require_batch, BATCH.id).status == "completed"


def test_a_change_that_is_repeated_is_the_same_success_and_changes_nothing(store: Store) -> None:
    """Who was not told that it took place repeats it."""
    start_batch(store, 1)
    write = store.write_blocking
    assert write(batch_rows.begin_batch, BATCH.id, "other", "f", 102)
    write(batch_rows.end_lines, BATCH.id, [result(1)])
    assert write(batch_rows.begin_finalizing, BATCH.id, 103)
    assert write(batch_rows.begin_finalizing, BATCH.id, 104)
    record = store.read_blocking(batch_rows.require_batch, BATCH.id)
    assert (record.model, record.in_progress_at, record.finalizing_at) == ("m", 101, 103)


def test_a_batch_that_fails_in_validation_keeps_no_lines(store: Store) -> None:
    store.write_blocking(batch_rows.create_batch, BATCH, ("file-o", "file-e"))
    store.write_blocking(batch_rows.insert_lines, BATCH.id, [NewLine(1, "c1", 0, 1, 0, 1)])
    assert store.write_blocking(batch_rows.fail_batch, BATCH.id, [], 102)
    assert store.write_blocking(batch_rows.fail_batch, BATCH.id, [], 103)
    assert store.read_blocking(batch_rows.require_batch, BATCH.id).failed_at == 102
    assert store.read_blocking(batch_rows.ended_lines, BATCH.id, 0, 10) == []


def test_lines_of_a_batch_have_their_own_custom_ids(store: Store) -> None:
    start_batch(store, 1)
    with pytest.raises(sa.exc.IntegrityError):
        store.write_blocking(batch_rows.insert_lines, BATCH.id, [NewLine(9, "c1", 0, 1, 0, 1)])
    with pytest.raises(sa.exc.IntegrityError):
        store.write_blocking(batch_rows.insert_lines, "batch_unknown", [NewLine(1, "c1", 0, 1, 0, 1)])


def test_deleting_a_batch_takes_its_lines_along(store: Store) -> None:
    start_batch(store, 2)
    store.write_blocking(lambda conn: conn.execute(batches.delete()).close())
    assert store.read_blocking(batch_rows.ended_lines, BATCH.id, 0, 10) == []
