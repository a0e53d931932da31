"""The write-ahead log of SQLite is lost, cut or damaged: what was checkpointed is there, and the start says so."""

import logging
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.data_dir import COMMITS, DATABASE_NAME, StoreError
from neaptide.server.batches.storing.databases import writer
from neaptide.server.batches.storing.store import Store
from tests.patience import until, until_here
from tests.server.batches.fakes import Server, numbered

WAL = f"{DATABASE_NAME}-wal"


def killed(live: Path, target: Path) -> Path:
    """What is on the disk now is what a ``kill -9`` would leave."""
    return Path(shutil.copytree(live, target, ignore=shutil.ignore_patterns("lock", "*-shm")))


def known(database: Path) -> list[str]:
    """Ids of the files that the database alone knows, without its log."""
    with closing(sqlite3.connect(f"{database.as_uri()}?immutable=1", uri=True)) as connection:
        return [row[0] for row in connection.execute("select id from files")]


def lacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "lacks its last" in text]


async def test_the_database_file_has_its_tables_from_the_first_start_on(tmp_path: Path) -> None:
    async with Server(tmp_path / "data"):
        copy = killed(tmp_path / "data", tmp_path / "copy")
    (copy / WAL).unlink(missing_ok=True)
    assert known(copy / DATABASE_NAME) == []
    async with Server(copy) as server:
        await server.upload(b"1\n")


async def test_what_was_acknowledged_is_in_the_database_file_when_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "QUIET_S", 0.001)
    async with Server(tmp_path) as server:
        file_id = (await server.upload(b"1\n")).id
        await until(lambda: known(tmp_path / DATABASE_NAME) == [file_id])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(5).randrange(len(content) // 2)] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [Path.unlink, cut, flip])
async def test_commits_that_a_lost_or_damaged_log_held_are_missed_at_start(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "QUIET_S", 600.0)
    async with Server(tmp_path / "data") as server:
        uploads = [(await server.upload(f"{number}\n".encode())).id for number in range(8)]
        whole = killed(tmp_path / "data", tmp_path / "whole")
        hurt = killed(tmp_path / "data", tmp_path / "hurt")
    caplog.clear()
    async with Server(whole) as server:
        assert [server.bytes_of(file_id) for file_id in uploads] == [f"{n}\n".encode() for n in range(8)]
    assert lacks(caplog) == []
    harm(hurt / WAL)
    caplog.set_level(logging.WARNING)
    async with Server(hurt) as server:
        assert len(lacks(caplog)) == 1
        left = await server.service.store.read(file_rows.all_file_ids)
        assert left < set(uploads)
        aside = {path.name for path in (hurt / "moved-aside").rglob("file-*")}
        assert left | aside == set(uploads)
        await server.upload(b"more\n")
    caplog.clear()
    async with Server(hurt):
        assert lacks(caplog) == []


@pytest.mark.parametrize("num_lost", [1, 3])
def test_what_is_missing_is_not_hidden_from_the_next_start_by_a_check(tmp_path: Path, num_lost: int) -> None:
    store = Store(tmp_path)
    store.open()
    store.close()
    shutil.copy(tmp_path / DATABASE_NAME, tmp_path / "older")
    store.open()
    for _ in range(num_lost - 1):  # opening has written once
        store.write_blocking(lambda conn: None)
    store.close()
    shutil.move(tmp_path / "older", tmp_path / DATABASE_NAME)
    for _ in range(3):
        store.open()  # which writes itself
        store.write_blocking(lambda conn: None)
        assert store.database.num_missing_commits == num_lost
        store.close()
    store.open()
    store.database.accept_as_it_is()
    store.write_blocking(lambda conn: None)
    store.close()
    store.open()
    assert store.database.num_missing_commits == 0
    store.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 21, b"twelve"])
def test_a_count_that_says_nothing_misses_nothing(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    store.open()
    store.close()
    (tmp_path / COMMITS).write_bytes(content)
    store.open()
    assert store.database.num_missing_commits == 0
    store.close()
    assert int((tmp_path / COMMITS).read_text()) > 0


def test_a_directory_of_before_there_was_a_count_misses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    store.write_blocking(lambda conn: conn.exec_driver_sql("delete from facts").close())
    store.close()
    (tmp_path / COMMITS).unlink()
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as connection, connection:
        connection.execute("delete from facts")
    store.open()
    assert store.database.num_missing_commits == 0
    store.close()


async def test_a_database_that_stood_wholly_in_a_lost_log_is_not_called_blank(tmp_path: Path) -> None:
    """As earlier versions left small installations: 4 KB of database, and everything in the log."""
    async with Server(tmp_path / "data") as server:
        await server.upload(numbered(1))
    with closing(sqlite3.connect(tmp_path / "all-in-log.db")) as connection:
        connection.execute("pragma journal_mode=wal")
        connection.execute("create table t (x)")
        until_here(lambda: (tmp_path / "all-in-log.db").stat().st_size == 4096)
        shutil.copy(tmp_path / "all-in-log.db", tmp_path / "data" / DATABASE_NAME)
    lost = f"has lost all its data with its write-ahead log {WAL}, which is missing or damaged.*restore"
    with pytest.raises(StoreError, match=lost):
        Store(tmp_path / "data").open()


async def test_a_quiet_database_is_checkpointed_by_the_writer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "QUIET_S", 0.001)
    async with Server(tmp_path) as server:
        calls: list[str] = []
        checkpoint = server.service.store.database.checkpoint

        def count() -> None:
            calls.append(threading.current_thread().name)
            checkpoint()

        monkeypatch.setattr(server.service.store.database, "checkpoint", count)
        await server.upload(b"1\n")
        await until(lambda: calls)
    assert set(calls) == {"batch-store-writer"}


async def test_a_database_that_is_away_when_it_is_quiet_ends_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "QUIET_S", 0.01)
    async with Server(tmp_path / "data") as server:
        with monkeypatch.context() as away:

            def refuse(_: object) -> None:
                raise sa.exc.OperationalError("connect", {}, sqlite3.OperationalError("unable to open database file"))

            engine = server.service.store.database._write_engine  # type: ignore[attr-defined]
            await server.upload(b"1\n")
            away.setattr(type(engine), "connect", refuse)
            await until(lambda: "the write-ahead log could not be checkpointed" in caplog.text)
        await server.upload(b"2\n")
