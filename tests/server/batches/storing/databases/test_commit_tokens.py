"""COMMITs that fail: what is asked afterwards, what callers are told, and that everything goes on."""

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import sqlalchemy as sa

from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.databases.commit_tokens import FORGOTTEN_AFTER_S, CommitQuestion, CommitTokens
from neaptide.server.batches.storing.files import UploadForm
from neaptide.server.batches.storing.housekeeping import Housekeeping
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store, StoreUnavailableError, WriteUnknownError
from neaptide.server.batches.storing.tables import commit_tokens
from tests.patience import PATIENCE_S, until
from tests.server.batches.fakes import CHAT, Server, numbered
from tests.server.batches.test_http import app_of, http_client

FILE = FileRecord("file-1", "", "a.jsonl", "batch", 3, "0" * 64, 100, None)
OTHER = replace(FILE, id="file-2")


@pytest.fixture(autouse=True)
def _no_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server writes by itself would take the failures that are meant for others."""
    monkeypatch.setattr(Housekeeping, "run", AsyncMock())


@pytest.fixture
def store(tmp_path: Path, store_url: str | None) -> Iterator[Store]:
    store = Store(tmp_path, sharing_of(store_url))
    store.open()
    yield store
    store.close()


class FailingDisk:
    """COMMITs of an SQLite store fail from now on, as where ``fsync`` does. The first of them may happen all the same,
    which cannot be seen before the disk works again: for the test it happens at once."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, happens: bool, failures: float = 1) -> None:
        monkeypatch.setattr("neaptide.server.batches.storing.databases.sqlite.ASK_PATIENCE_S", 0.05)
        monkeypatch.setattr("neaptide.server.batches.storing.databases.writer.ASK_INTERVAL_S", 0.01)
        engine: Any = store.database._write_engine  # type: ignore[attr-defined]
        self._dialect, self._commit = engine.dialect, engine.dialect.do_commit
        self._happens, self._failures = happens, failures
        self.has_failed = threading.Event()
        engine.dialect.do_commit = self

    def __call__(self, connection: Any) -> None:
        if self._happens:
            self._commit(connection)
        self._happens = False
        self._failures -= 1
        if self._failures <= 0:
            self.mend()
        self.has_failed.set()
        raise sqlite3.OperationalError("disk I/O error")

    def mend(self) -> None:
        self._dialect.do_commit = self._commit


# ---- what is asked --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("is_first_answer_committed", [True, False])
def test_who_asks_again_hears_the_same(store: Store, is_committed: bool, is_first_answer_committed: bool) -> None:
    """The COMMIT of the first question may be cut off like any other, before it or after it."""
    tokens = CommitTokens()
    store.write_blocking(tokens.put)

    def run(operation: Any, commits: bool) -> Any:
        with store.database._write_engine.connect() as conn, conn.begin() as transaction:  # type: ignore[attr-defined]
            found = operation(conn)
            (transaction.commit if commits else transaction.rollback)()
            return found

    question = CommitQuestion(tokens, run(tokens.put, is_committed))
    assert run(question.ask, is_first_answer_committed) is is_committed
    assert run(question.ask, True) is is_committed
    assert run(question.ask, True) is is_committed


def test_an_older_database_that_does_not_know_the_server_says_nothing(store: Store) -> None:
    tokens = CommitTokens()
    question = CommitQuestion(tokens, store.write_blocking(tokens.put))
    store.write_blocking(lambda conn: conn.execute(commit_tokens.delete()).close())
    assert store.write_blocking(question.ask) is None


def test_rows_of_servers_that_are_long_gone_are_removed(store: Store) -> None:
    gone, here = CommitTokens(), CommitTokens()
    store.write_blocking(gone.put)
    store.write_blocking(here.put)

    def age(conn: sa.Connection) -> None:
        rows = commit_tokens.update().where(commit_tokens.c.server == gone._server)
        conn.execute(rows.values(changed_at=commit_tokens.c.changed_at - FORGOTTEN_AFTER_S - 60))

    store.write_blocking(age)
    store.write_blocking(CommitTokens().put)
    names = set(store.read_blocking(lambda conn: conn.execute(sa.select(commit_tokens.c.server)).scalars().all()))
    assert here._server in names
    assert gone._server not in names
    store.write_blocking(gone.put)  # one that lives after all makes a new one


# ---- what callers are told ------------------------------------------------------------------------------


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    store.open()
    yield store
    store.close()


def test_a_commit_that_failed_and_happened_is_a_success(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    FailingDisk(sqlite_store, monkeypatch, happens=True)
    assert sqlite_store.write_blocking(file_rows.insert_file, FILE) == FILE
    assert sqlite_store.read_blocking(file_rows.all_file_ids) == {FILE.id}


def test_a_commit_that_failed_and_did_not_happen_is_known_to_be_none(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    FailingDisk(sqlite_store, monkeypatch, happens=False)
    with pytest.raises(StoreUnavailableError, match="disk I/O error") as refused:
        sqlite_store.write_blocking(file_rows.insert_file, FILE)
    assert not isinstance(refused.value, WriteUnknownError)
    assert sqlite_store.num_unknown == 0
    assert sqlite_store.read_blocking(file_rows.all_file_ids) == set()


@pytest.mark.parametrize("happens", [True, False])
def test_a_commit_of_which_the_disk_does_not_say_whether_it_happened_is_unknown(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch, happens: bool
) -> None:
    disk = FailingDisk(sqlite_store, monkeypatch, happens, failures=float("inf"))
    with pytest.raises(WriteUnknownError):
        sqlite_store.write_blocking(file_rows.insert_file, FILE)
    assert (sqlite_store.num_unknown, sqlite_store.failing) == (1, True)
    disk.mend()
    assert sqlite_store.write_blocking(file_rows.insert_file, OTHER) == OTHER
    assert not sqlite_store.failing


def test_a_database_that_does_not_know_the_server_any_more_cannot_say(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(sqlite_store, monkeypatch, happens=True)

    def insert_and_replace(conn: sa.Connection) -> None:
        file_rows.insert_file(conn, FILE)
        sqlite_store.database._tokens = CommitTokens()  # type: ignore[attr-defined]

    tokens = sqlite_store.database._tokens  # type: ignore[attr-defined]
    monkeypatch.setattr(tokens, "locked", lambda conn: None)
    with pytest.raises(WriteUnknownError):
        sqlite_store.write_blocking(file_rows.insert_file, FILE)
    assert disk.has_failed.is_set()


async def test_what_is_written_while_the_outcome_is_asked_for_fails_at_once(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(sqlite_store, monkeypatch, happens=False, failures=float("inf"))
    monkeypatch.setattr("neaptide.server.batches.storing.databases.sqlite.ASK_PATIENCE_S", PATIENCE_S)
    first = sqlite_store._open_writer().submit(lambda conn: file_rows.insert_file(conn, FILE))
    assert disk.has_failed.wait(PATIENCE_S)
    with pytest.raises(StoreUnavailableError) as refused:
        await sqlite_store.write(file_rows.insert_file, OTHER)
    assert not isinstance(refused.value, WriteUnknownError)
    assert not first.done()
    disk.mend()
    assert isinstance(first.exception(PATIENCE_S), sa.exc.OperationalError)


# ---- what becomes of it ---------------------------------------------------------------------------------


async def send(server: Server, key: str) -> FileRecord:
    async with server.service.files.upload() as upload:
        await upload.write(numbered(2))
        return await server.service.files.commit(upload, UploadForm("a.jsonl", "batch"), "", key)


@pytest.mark.parametrize("happens", [True, False])
async def test_an_upload_of_unknown_outcome_that_is_repeated_is_one_file_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool
) -> None:
    async with Server(tmp_path) as server:
        disk = FailingDisk(server.service.store, monkeypatch, happens, failures=float("inf"))
        with pytest.raises(WriteUnknownError):
            await send(server, "one")
        (kept,) = (tmp_path / "files").iterdir()
        disk.mend()
        file = await send(server, "one")
        assert (file.id == kept.name) is happens
        assert server.bytes_of(file.id) == numbered(2)
        await until(lambda: [path.name for path in (tmp_path / "files").iterdir()] == [file.id])


async def test_bytes_of_an_upload_that_did_not_happen_are_removed_once_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        disk = FailingDisk(server.service.store, monkeypatch, happens=False, failures=float("inf"))
        with pytest.raises(WriteUnknownError):
            await send(server, "one")
        assert len(list((tmp_path / "files").iterdir())) == 1
        disk.mend()
        await until(lambda: not list((tmp_path / "files").iterdir()))


async def test_a_batch_of_unknown_outcome_that_happened_runs_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        server.engine.auto = True
        file = await server.upload(numbered(2))
        disk = FailingDisk(server.service.store, monkeypatch, happens=True, failures=float("inf"))
        body = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file.id}
        with pytest.raises(WriteUnknownError):
            await server.service.create_batch("", body, idempotency_key="one")
        disk.mend()
        (batch,), _ = await server.service.list_batches("", 9, None)
        server.results(await server.until_status(batch.id, "completed"))
        assert (await server.service.create_batch("", body, idempotency_key="one")).id == batch.id
        assert len(server.engine.executed) == 2


async def test_a_cancel_of_unknown_outcome_that_happened_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        disk = FailingDisk(server.service.store, monkeypatch, happens=True, failures=float("inf"))
        with pytest.raises(WriteUnknownError):
            await server.service.cancel_batch(batch.id, "")
        disk.mend()
        server.results(await server.until_status(batch.id, "cancelled"))


async def test_a_client_is_not_told_that_nothing_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        disk = FailingDisk(server.service.store, monkeypatch, happens=True, failures=float("inf"))
        reply = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"x")})
        disk.mend()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
        assert reply.json()["error"]["message"] == (
            "It is not known whether this was stored. Check, or send it again with the same Idempotency-Key."
        )
        assert reply.headers["retry-after"]
