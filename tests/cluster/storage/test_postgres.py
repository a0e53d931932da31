"""What only PostgreSQL brings: other servers, and a connection that may break at any moment."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command

from neaptide.cluster.sharing import sharing_of
from neaptide.cluster.storage.postgres import PostgresDatabase, postgres_url
from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from tests.patience import PATIENCE_S, until_here
from tests.postgres import PostgresServer

FILE = FileRecord("file-1", "", "a.jsonl", "batch", 3, "0" * 64, 100, None)
OTHER = replace(FILE, id="file-2")


@pytest.fixture
def database(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture
def store(tmp_path: Path, postgres_server: PostgresServer, database: str) -> Iterator[Store]:
    store = Store(tmp_path / "data", sharing_of(postgres_server.url(database)))
    store.open()
    yield store
    store.close()


class BreakingCommit:
    """The next commit loses its connection, before it or after it."""

    def __init__(self, store: Store, server: PostgresServer, *, commits: bool, stops_server: bool = False) -> None:
        assert isinstance(store.database, PostgresDatabase)
        assert store.database._write_engine is not None
        self._dialect: Any = store.database._write_engine.dialect
        self._commit = self._dialect.do_commit
        self._server, self._commits, self._stops_server = server, commits, stops_server
        self._dialect.do_commit = self
        self.is_broken = threading.Event()

    def __call__(self, connection: Any) -> None:
        self._dialect.do_commit = self._commit
        connection = connection.driver_connection
        if self._commits:
            connection.commit()
        if self._stops_server:
            self._server.stop()
        else:
            self._server.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 10000)")
        self.is_broken.set()
        connection.execute("SELECT 1")


def test_a_commit_whose_answer_was_lost_is_a_success(store: Store, postgres_server: PostgresServer) -> None:
    BreakingCommit(store, postgres_server, commits=True)
    assert store.write_blocking(file_rows.insert_file, FILE) == FILE
    assert store.read_blocking(file_rows.all_file_ids) == {FILE.id}


def test_a_commit_that_was_cut_off_is_none(store: Store, postgres_server: PostgresServer) -> None:
    BreakingCommit(store, postgres_server, commits=False)
    with pytest.raises(StoreUnavailableError):
        store.write_blocking(file_rows.insert_file, FILE)
    assert store.read_blocking(file_rows.all_file_ids) == set()
    assert store.write_blocking(file_rows.insert_file, FILE) == FILE


async def test_who_asks_meanwhile_is_told_and_the_answer_comes_when_the_database_is_back(
    store: Store, postgres_server: PostgresServer
) -> None:
    commit = BreakingCommit(store, postgres_server, commits=True, stops_server=True)
    try:
        lost = store._open_writer().submit(lambda conn: file_rows.insert_file(conn, FILE))
        assert commit.is_broken.wait(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError):
                await store.write(file_rows.insert_file, OTHER)
        assert not lost.done()
        with pytest.raises(StoreUnavailableError):
            await store.read(file_rows.all_file_ids)
    finally:
        postgres_server.start()
    assert lost.result(PATIENCE_S) == FILE
    assert await store.read(file_rows.all_file_ids) == {FILE.id}
    assert await store.write(file_rows.insert_file, OTHER) == OTHER


def test_a_server_that_ends_leaves_an_unknown_commit_to_the_next_start(
    store: Store, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    commit = BreakingCommit(store, postgres_server, commits=True, stops_server=True)
    try:
        lost = store._open_writer().submit(lambda conn: file_rows.insert_file(conn, FILE))
        assert commit.is_broken.wait(PATIENCE_S)
        store.close()
        assert lost.exception(0) is not None
    finally:
        postgres_server.start()
    store.open()
    assert store.read_blocking(file_rows.all_file_ids) == {FILE.id}


def test_after_a_restart_of_the_database_the_first_write_succeeds(
    store: Store, postgres_server: PostgresServer
) -> None:
    store.write_blocking(file_rows.insert_file, FILE)
    postgres_server.stop()
    postgres_server.start()
    assert store.write_blocking(file_rows.insert_file, OTHER) == OTHER
    assert store.read_blocking(file_rows.all_file_ids) == {FILE.id, OTHER.id}


def test_a_second_server_on_one_database_is_refused(
    store: Store, postgres_server: PostgresServer, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.cluster.storage.postgres.SERVER_LOCK_TIMEOUT_S", 0.1)
    second = Store(tmp_path / "other", sharing_of(postgres_server.url(database)))
    with pytest.raises(StoreError, match="another neaptide server uses it"):
        second.open()
    store.close()
    second.open()
    second.close()


def test_a_directory_with_a_database_of_its_own_is_refused(
    store: Store, postgres_server: PostgresServer, database: str, tmp_path: Path
) -> None:
    own = Store(tmp_path / "own")
    own.open()
    own.close()
    with pytest.raises(StoreError, match="holds an SQLite database"):
        Store(tmp_path / "own", sharing_of(postgres_server.url(database))).open()


def test_a_weak_default_of_the_database_is_overruled(
    postgres_server: PostgresServer, database: str, tmp_path: Path
) -> None:
    postgres_server.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
    store = Store(tmp_path, sharing_of(postgres_server.url(database)))
    store.open()
    try:
        found = store.write_blocking(lambda conn: conn.exec_driver_sql("SHOW synchronous_commit").scalar_one())
        assert found == "on"
    finally:
        store.close()


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("postgres://me:secret@host/data", "postgresql://me:***@host/data"),
        ("postgresql://host/data?user=me&password=secret", "postgresql://host/data?password=***&user=me"),
        ("postgresql://host/data?pasword=secret", "postgresql://host/data?pasword=***"),
        (
            "postgresql://host/data?sslpassword=secret&sslmode=require",
            "postgresql://host/data?sslmode=***&sslpassword=***",
        ),
    ],
)
def test_an_address_is_shown_without_its_passwords(address: str, name: str) -> None:
    assert PostgresDatabase(postgres_url(address)).name == name


@pytest.mark.parametrize("wrong", ["user=me&password=secret", "pasword=secret", "password=secret&password=secret2"])
def test_an_address_that_does_not_work_is_refused_without_its_password(wrong: str) -> None:
    with pytest.raises(StoreError, match="cannot be used") as refused:
        PostgresDatabase(postgres_url(f"postgresql://localhost:1/data?{wrong}")).open()
    assert "secret" not in str(refused.value)


def test_messages_hold_no_password() -> None:
    for text in ("mysql://me:secret@host/data", "postgresql//me:secret"):
        with pytest.raises(StoreError) as refused:
            postgres_url(text)
        assert "secret" not in str(refused.value)


def test_servers_that_start_together_on_a_blank_database_wait_for_each_other(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is about to make the tables does so when another one waits for that, or is about to make them as well."""
    database = postgres_server.new_database("template1")
    upgrade, about_to = command.upgrade, []

    def upgrade_beside_another(config: Any, revision: str) -> None:
        about_to.append(threading.get_ident())
        until_here(lambda: len(about_to) > 1 or num_waiting(postgres_server))
        upgrade(config, revision)

    monkeypatch.setattr(command, "upgrade", upgrade_beside_another)
    blobs = f"file://{tmp_path}/blobs"
    stores = [Store(tmp_path / name, sharing_of(postgres_server.url(database), blobs)) for name in "ab"]
    faults: list[BaseException] = []

    def open_one(store: Store) -> None:
        try:
            store.open()
        except StoreError as error:
            faults.append(error)

    threads = [threading.Thread(target=open_one, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    try:
        assert faults == []
        assert len(about_to) == 1
    finally:
        for store in stores:
            store.close()


def num_waiting(server: PostgresServer) -> int:
    """Sessions that wait for a lock of ours."""
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with server.connect() as connection:
        row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])
