"""A database that is silent and not gone: every call ends in time, and everything goes on when it answers again."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.data_dir import DATABASE_NAME
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store, StoreUnavailableError, WriteUnknownError
from tests.cluster.storage.silence import SilentProxy, locked_table, stopped_backends
from tests.patience import PATIENCE_S, until, until_here
from tests.postgres import PostgresServer

LIMIT_S = 0.5
FILES = [FileRecord(f"file-{n}", "", "a.jsonl", "batch", 3, "0" * 64, 100, None) for n in range(8)]
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
def database(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[SilentProxy]:
    with closing(SilentProxy(postgres_server)) as proxy:
        yield proxy


@pytest.fixture
def store(tmp_path: Path, proxy: SilentProxy, database: str) -> Iterator[Store]:
    with closing(Store(tmp_path / "data", sharing_of(proxy.url(database)))) as store:
        store.open()
        yield store


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "data")) as store:
        store.open()
        yield store


@contextmanager
def hasty(store: Store) -> Iterator[None]:
    """Only while the database is silent: a busy machine may take longer for what does end."""
    limit_s, store.limit_s = store.limit_s, LIMIT_S
    try:
        yield
    finally:
        store.limit_s = limit_s


Silence = Callable[[], AbstractContextManager[None]]


@pytest.fixture(params=["proxy", "stopped backends", "locked table"])
def silence(request: pytest.FixtureRequest, proxy: SilentProxy, database: str) -> Silence:
    server: PostgresServer = request.getfixturevalue("postgres_server")
    ways: dict[str, Silence] = {
        "proxy": proxy.silence,
        "stopped backends": lambda: stopped_backends(server, database),
        "locked table": lambda: locked_table(server, database, "files"),
    }
    return ways[request.param]


def ids_here(store: Store) -> set[str]:
    """As soon as the database answers in time."""
    found: list[set[str]] = []

    def ask() -> bool:
        try:
            found.append(store.read_blocking(file_rows.all_file_ids))
        except StoreUnavailableError:
            return False
        return True

    until_here(ask)
    return found[0]


async def outcomes(store: Store) -> list[object]:
    """Of as many reads as writes, all at once, and more than there are threads."""
    reads = [store.read(file_rows.all_file_ids) for _ in FILES]
    writes = [store.write(file_rows.insert_file, file) for file in FILES]
    return await asyncio.gather(*reads, *writes, return_exceptions=True)


async def test_every_call_to_a_silent_database_ends_and_later_ones_succeed(store: Store, silence: Silence) -> None:
    assert not store.failing
    with silence(), hasty(store):
        started_s = time.monotonic()
        found = await outcomes(store)
        assert time.monotonic() - started_s < PATIENCE_S
        assert [type(one) for one in found] == [StoreUnavailableError] * len(found)
        assert store.failing
    assert ids_here(store) == set()
    until_here(lambda: _can_write(store))
    assert not store.failing


def _can_write(store: Store) -> bool:
    try:
        store.write_blocking(file_rows.insert_file, replace(FILES[0], id="file-new"))
    except StoreUnavailableError:
        return False
    return True


async def test_what_was_given_up_is_not_written_later(store: Store, proxy: SilentProxy, database: str) -> None:
    with proxy.silence(), hasty(store):
        await outcomes(store)
    until_here(lambda: _can_write(store))
    assert ids_here(store) == {"file-new"}


async def test_a_deadline_closes_the_connection_and_frees_the_thread(store: Store, proxy: SilentProxy) -> None:
    ids_here(store)
    with proxy.silence(), hasty(store):
        await outcomes(store)
        until_here(lambda: proxy.num_open == 0)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("batch-store-reader")]
    assert len(names) <= 4
    assert ids_here(store) == set()


def test_a_deadline_sends_no_cancel(store: Store, postgres_server: PostgresServer, database: str) -> None:
    """A COMMIT that waits for its standby would end with a warning, and be called a success."""
    waits = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}' AND wait_event = 'SyncRep'"

    def num_waiting() -> int:
        with postgres_server.connect() as connection:
            row = connection.execute(waits).fetchone()  # type: ignore[arg-type]
            assert row is not None
            return int(row[0])

    written: set[str] = set()

    def waits_for_standby() -> bool:
        file = replace(FILES[0], id=f"file-{len(written)}")
        written.add(file.id)
        try:
            store.write_blocking(file_rows.insert_file, file)
        except WriteUnknownError:
            return True
        return False

    postgres_server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    try:
        postgres_server.execute("SELECT pg_reload_conf()")
        with hasty(store):
            # The setting takes a moment to hold.
            until_here(waits_for_standby)
        assert num_waiting() == 1
        assert store.failing
    finally:
        postgres_server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        postgres_server.execute("SELECT pg_reload_conf()")
    until_here(lambda: num_waiting() == 0)
    assert ids_here(store) == written


async def test_a_write_whose_turn_does_not_come_never_runs(small_store: Store) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def wait(conn: sa.Connection) -> None:
        begun.set()
        goes_on.wait(PATIENCE_S)

    slow = asyncio.create_task(small_store.write(wait))
    await until(begun.is_set)
    with hasty(small_store), pytest.raises(StoreUnavailableError, match="turn"):
        await small_store.write(file_rows.insert_file, FILES[0])
    goes_on.set()
    await slow
    await small_store.write(file_rows.insert_file, FILES[1])
    assert small_store.read_blocking(file_rows.all_file_ids) == {FILES[1].id}


async def test_a_write_whose_thread_does_not_end_is_unknown_and_looked_after(
    small_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk does not come back from a call. The write may still happen."""
    monkeypatch.setattr("neaptide.server.batches.storing.databases.deadline.GRACE_S", 0.01)
    goes_on = threading.Event()

    def wait_and_insert(conn: sa.Connection) -> None:
        goes_on.wait(PATIENCE_S)
        file_rows.insert_file(conn, FILES[0])

    with hasty(small_store), pytest.raises(WriteUnknownError):
        await small_store.write(wait_and_insert)
    assert (small_store.num_unknown, small_store.failing) == (1, True)
    goes_on.set()
    # What is past its deadline is not committed, as it happens, and later writes come after it.
    await small_store.write(file_rows.insert_file, FILES[1])
    assert small_store.read_blocking(file_rows.all_file_ids) == {FILES[1].id}


async def test_a_query_of_sqlite_that_does_not_end_is_ended(small_store: Store) -> None:
    with hasty(small_store), pytest.raises(StoreUnavailableError, match="interrupted"):
        await small_store.read(lambda conn: conn.execute(sa.text(ENDLESS)).scalar_one())

    def insert_and_hang(conn: sa.Connection) -> None:
        file_rows.insert_file(conn, FILES[0])
        conn.execute(sa.text(ENDLESS))

    with hasty(small_store), pytest.raises(StoreUnavailableError, match="interrupted"):
        await small_store.write(insert_and_hang)
    assert small_store.read_blocking(file_rows.all_file_ids) == set()
    await small_store.write(file_rows.insert_file, FILES[0])
    assert not small_store.failing


async def test_a_locked_database_of_sqlite_is_waited_for_until_the_deadline(tmp_path: Path, small_store: Store) -> None:
    with closing(sqlite3.connect(tmp_path / "data" / DATABASE_NAME, isolation_level=None)) as holder:
        holder.execute("begin immediate")
        with hasty(small_store), pytest.raises(StoreUnavailableError):
            await small_store.write(file_rows.insert_file, FILES[0])
        assert await small_store.read(file_rows.all_file_ids) == set()
        assert small_store.failing
        holder.execute("rollback")
    await small_store.write(file_rows.insert_file, FILES[0])
    assert not small_store.failing
