"""How writes are grouped, and that a group which did not commit is no success."""

import queue
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.databases.sqlite import SqliteDatabase
from neaptide.server.batches.storing.databases.writer import MAX_GROUP_ROWS, Writer
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store, StoreUnavailableError

FILE = FileRecord("file-1", "", "a.jsonl", "batch", 3, "0" * 64, 100, None)


class NotedQueue(queue.SimpleQueue[Any]):
    """Notes how long the writer is ready to wait for more; nothing more ever comes."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is not None:
            self.waits_s.append(timeout)
        return super().get(block=False)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> tuple[Writer, NotedQueue]:
    """A writer whose clock stands still."""
    monkeypatch.setattr("neaptide.server.batches.storing.databases.writer.time.monotonic", lambda: 7.0)
    writer = Writer(SqliteDatabase(Path("never opened")))
    noted = NotedQueue()
    monkeypatch.setattr(writer, "_queue", noted)
    return writer, noted


def test_a_grouped_write_waits_50_ms_for_company(noted: tuple[Writer, NotedQueue]) -> None:
    writer, waits = noted
    writer.submit(lambda conn: None, urgent=False)
    group, closing = writer._next_group()
    assert (len(group), closing) == (1, False)
    assert waits.waits_s == [pytest.approx(0.05)]


def test_an_urgent_write_takes_along_what_is_there_and_waits_for_nothing(noted: tuple[Writer, NotedQueue]) -> None:
    writer, waits = noted
    writer.submit(lambda conn: None, urgent=True)
    writer.submit(lambda conn: None, urgent=False)
    group, _ = writer._next_group()
    assert (len(group), waits.waits_s) == (2, [])


def test_an_urgent_write_ends_the_wait_of_a_group(noted: tuple[Writer, NotedQueue]) -> None:
    writer, waits = noted
    writer.submit(lambda conn: None, urgent=False)
    writer.submit(lambda conn: None, urgent=True)
    group, _ = writer._next_group()
    assert (len(group), waits.waits_s) == (2, [pytest.approx(0.05)])


def test_a_full_group_waits_for_nothing(noted: tuple[Writer, NotedQueue]) -> None:
    writer, waits = noted
    writer.submit(lambda conn: None, rows=MAX_GROUP_ROWS, urgent=False)
    group, _ = writer._next_group()
    assert (len(group), waits.waits_s) == (1, [])


@pytest.mark.acceptance("A8", "a transaction that the database has dropped without a word")
def test_a_dropped_transaction_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.open()
    attempt = Writer._attempt

    def attempt_and_drop(self: Writer, conn: sa.Connection, operation: Any) -> Any:
        outcome = attempt(self, conn, operation)
        dbapi_connection: Any = conn.connection.driver_connection
        dbapi_connection.rollback()
        return outcome

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "_attempt", attempt_and_drop)
            with pytest.raises(StoreUnavailableError):
                store.write_blocking(file_rows.insert_file, FILE)
        assert store.read_blocking(file_rows.all_file_ids) == set()
        store.write_blocking(file_rows.insert_file, FILE)
        assert store.read_blocking(file_rows.all_file_ids) == {"file-1"}
    finally:
        store.close()


def test_a_group_that_another_server_was_in_the_way_of_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.open()
    tries: list[int] = []

    def insert(conn: sa.Connection) -> None:
        file_rows.insert_file(conn, FILE)
        tries.append(len(tries))
        if len(tries) < 3:
            raise sa.exc.OperationalError("UPDATE", {}, RuntimeError("deadlock detected"))

    monkeypatch.setattr(store.database, "is_conflict", lambda error: "deadlock" in str(error))
    try:
        store.write_blocking(insert)
        assert tries == [0, 1, 2]
        assert store.read_blocking(file_rows.all_file_ids) == {FILE.id}
    finally:
        store.close()
