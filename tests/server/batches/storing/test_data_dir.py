"""Whose a data directory is: what is ours is taken and closed to others, what is not is left alone."""

import errno
import json
import logging
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from neaptide.server.batches.storing import data_dir
from neaptide.server.batches.storing.data_dir import DATABASE_NAME, MARK_NAME, DataDir, DataDirLockedError, StoreError
from neaptide.server.batches.storing.store import Store
from tests.server.batches.fakes import Server, numbered


def snapshot(root: Path) -> dict[str, bytes | str]:
    """Everything below a directory, links as where they lead."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def refusal(path: Path, create: bool = True) -> str:
    """The one line in which the directory is refused."""
    with pytest.raises(StoreError) as refused:
        DataDir(path).open(create)
    text = str(refused.value)
    assert "\n" not in text
    return text


def open_once(path: Path) -> None:
    directory = DataDir(path)
    directory.open()
    directory.close()


async def used(path: Path) -> str:
    """Leaves a data directory with one file in it; returns the file's id."""
    async with Server(path) as server:
        return (await server.upload(b"kept\n")).id


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# ---- whose it is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["files/thesis.txt", "jobs/cron.txt", "notes.md", f"{DATABASE_NAME}-wal"])
def test_a_directory_of_other_people_is_refused_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    tmp_path.chmod(0o755)
    before = snapshot(tmp_path)
    text = refusal(tmp_path)
    assert f"{tmp_path} is not a neaptide data directory, and is not empty" in text
    assert name.split("/")[0] in text
    assert "choose an empty or a new one with --data-dir" in text
    assert snapshot(tmp_path) == before
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_lock_of_another_program_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("held by backup.sh\n")
    assert "is not empty ('lock')" in refusal(tmp_path)
    assert (tmp_path / "lock").read_text() == "held by backup.sh\n"


def test_a_foreign_database_is_refused_untouched(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        connection.execute("create table recipes (name text)")
    connection.close()
    (tmp_path / "recipes.txt").touch()
    before = snapshot(tmp_path)
    assert "is not a neaptide data directory" in refusal(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_new_directory_is_made_and_marked(tmp_path: Path) -> None:
    open_once(tmp_path / "a" / "b")
    assert json.loads((tmp_path / "a" / "b" / MARK_NAME).read_bytes()) == {"format": 1}
    open_once(tmp_path / "a" / "b")


def test_what_a_first_start_that_was_cut_off_leaves_is_blank(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("4711\n")
    (tmp_path / f"{MARK_NAME}.tmp").write_bytes(b"{")
    (tmp_path / "lost+found").mkdir()  # of a new file system
    for name in ("files", "jobs"):
        (tmp_path / name).mkdir()
    (tmp_path / DATABASE_NAME).touch()
    open_once(tmp_path)
    assert (tmp_path / MARK_NAME).exists()
    assert not (tmp_path / f"{MARK_NAME}.tmp").exists()


async def test_a_directory_of_a_version_without_marks_is_adopted(tmp_path: Path) -> None:
    file_id = await used(tmp_path)
    (tmp_path / MARK_NAME).unlink()
    (tmp_path / "server.log").touch()
    async with Server(tmp_path) as server:
        assert server.bytes_of(file_id) == b"kept\n"
    assert (tmp_path / MARK_NAME).exists()


async def test_what_only_the_write_ahead_log_knows_is_enough_to_adopt(tmp_path: Path) -> None:
    async with Server(tmp_path / "live") as server:
        file_id = (await server.upload(b"kept\n")).id
        # What is on disk now is what a kill -9 would leave.
        for path in (tmp_path / "live").rglob("*"):
            if path.is_file() and path.name not in ("lock", MARK_NAME):
                copy = tmp_path / "copy" / path.relative_to(tmp_path / "live")
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    async with Server(tmp_path / "copy") as again:
        assert again.bytes_of(file_id) == b"kept\n"


@pytest.mark.parametrize(
    ("mark", "words"),
    [(b'{"format": 2}', "newer neaptide (format 2)"), (b"", "damaged"), (b'{"format": true}', "dama")],
)
async def test_a_mark_that_is_not_understood_is_a_refusal(tmp_path: Path, mark: bytes, words: str) -> None:
    await used(tmp_path)
    (tmp_path / MARK_NAME).write_bytes(mark)
    assert words in refusal(tmp_path)


def test_without_create_nothing_is_made(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none", create=False)
    assert "is not a neaptide data directory" in refusal(tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []


# ---- the database is gone --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_emptied", [False, True])
async def test_a_missing_or_emptied_database_beside_files_is_a_refusal(tmp_path: Path, is_emptied: bool) -> None:
    file_id = await used(tmp_path)
    (tmp_path / DATABASE_NAME).unlink()
    if is_emptied:
        (tmp_path / DATABASE_NAME).touch()
    text = refusal(tmp_path)
    assert ("is blank" if is_emptied else "is missing") in text
    assert "restore the database, or move files away to start empty" in text
    assert (tmp_path / "files" / file_id).read_bytes() == b"kept\n"


async def test_a_log_without_its_database_is_a_refusal(tmp_path: Path) -> None:
    open_once(tmp_path)
    (tmp_path / DATABASE_NAME).unlink()
    (tmp_path / f"{DATABASE_NAME}-wal").write_bytes(b"committed")
    assert "there is still neaptide.db-wal next to it" in refusal(tmp_path)


def test_a_marked_directory_without_anything_in_it_begins_anew(tmp_path: Path) -> None:
    open_once(tmp_path)
    (tmp_path / DATABASE_NAME).unlink()
    open_once(tmp_path)
    assert (tmp_path / DATABASE_NAME).exists()


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_write_that_was_cut_off_is_taken_back_in_a_database_of_ours_only(tmp_path: Path, is_marked: bool) -> None:
    before, killed = tmp_path / "before", tmp_path / "killed"
    open_once(before)
    with closing(sqlite3.connect(before / DATABASE_NAME, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (value BLOB)")
        connection.execute("PRAGMA cache_size = 2")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t SELECT randomblob(4096) FROM json_each(json_array(1, 2, 3, 4, 5, 6, 7, 8))")
        shutil.copytree(before, killed)  # as SIGKILL leaves it: with a journal that must be rolled back
    assert (killed / f"{DATABASE_NAME}-journal").stat().st_size > 0
    if is_marked:
        open_once(killed)
        with closing(sqlite3.connect(killed / DATABASE_NAME)) as connection:
            assert connection.execute("SELECT count(*) FROM t").fetchall() == [(0,)]
    else:
        (killed / MARK_NAME).unlink()
        content = snapshot(killed)
        assert "cannot be opened" in refusal(killed)
        assert snapshot(killed) == content


# ---- what the database does not know ---------------------------------------------------------------------


async def test_what_is_unknown_is_moved_aside_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file_id = await used(tmp_path)
    (tmp_path / "files" / "thesis.txt").write_bytes(b"years of work")
    (tmp_path / "files" / "pictures").mkdir()
    (tmp_path / "files" / "pictures" / "cat.png").write_bytes(b"cat")
    (tmp_path / "files" / "link").symlink_to("/etc/hostname")
    (tmp_path / "jobs" / "cron.txt").write_bytes(b"0 0 * * *")
    caplog.set_level(logging.WARNING)
    async with Server(tmp_path):
        aside = tmp_path / "moved-aside" / "2027-01-15T08-00-00Z"
        assert snapshot(aside) == {
            "files/thesis.txt": b"years of work",
            "files/pictures/cat.png": b"cat",
            "files/link": "/etc/hostname",
            "jobs/cron.txt": b"0 0 * * *",
        }
        assert [path.name for path in (tmp_path / "files").iterdir()] == [file_id]
        assert list((tmp_path / "jobs").iterdir()) == []
    messages = [record.getMessage() for record in caplog.records]
    assert any("moved 3 entries" in text and "link, pictures, thesis.txt" in text for text in messages)
    assert any("moved 1 entries" in text and "cron.txt" in text for text in messages)


async def test_two_starts_in_one_second_move_to_two_places(tmp_path: Path) -> None:
    for content in (b"1", b"2"):
        await used(tmp_path)
        (tmp_path / "files" / "thesis.txt").write_bytes(content)
    await used(tmp_path)
    assert sorted(snapshot(tmp_path / "moved-aside").values()) == [b"1", b"2"]


async def test_an_older_copy_of_the_database_costs_no_upload(tmp_path: Path) -> None:
    first = await used(tmp_path)
    backup = (tmp_path / DATABASE_NAME).read_bytes()
    async with Server(tmp_path) as server:
        second = (await server.upload(numbered(1))).id
        await server.create(input_file_id=second)
    (tmp_path / DATABASE_NAME).write_bytes(backup)
    async with Server(tmp_path) as server:
        assert server.bytes_of(first) == b"kept\n"
    assert snapshot(tmp_path / "moved-aside")[f"2027-01-15T08-00-00Z/files/{second}"] == numbered(1)


async def test_a_deletion_that_a_crash_cut_off_is_finished_not_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        file_id = (await server.upload(b"secret\n")).id

        async def die(*_: object) -> bool:
            raise KeyError("the power went")

        monkeypatch.setattr(server.service.files, "remove", die)
        with pytest.raises(KeyError):
            await server.service.files.delete(file_id, "")
        assert (tmp_path / "files" / file_id).exists()
    async with Server(tmp_path):
        assert list((tmp_path / "files").iterdir()) == []
        assert not (tmp_path / "moved-aside").exists()


async def test_files_that_finalizing_will_compare_stay_and_torn_ones_go(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(1))
        await server.until_given(batch.id)
    (tmp_path / "files" / batch.planned_output_file_id).write_bytes(b"published, not committed")
    (tmp_path / "files" / f"{batch.planned_error_file_id}.tmp").write_bytes(b"half")
    async with Server(tmp_path) as server:
        names = {path.name for path in (tmp_path / "files").iterdir()}
        assert names == {batch.input_file_id, batch.planned_output_file_id}
        assert not (tmp_path / "moved-aside").exists()


# ---- odd kinds and places --------------------------------------------------------------------------------


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    assert "is not a directory" in refusal(tmp_path / "data")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "is not a directory" in refusal(tmp_path / "dangling")
    assert "cannot use the data directory" in refusal(tmp_path / "data" / "below")


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    open_once(tmp_path / "data")
    assert (tmp_path / "disk" / MARK_NAME).exists()
    assert (tmp_path / "data").is_symlink()


@pytest.mark.parametrize("name", ["files", "jobs", "moved-aside"])
async def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    await used(tmp_path / "data")
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "thesis.txt").touch()
    folder = tmp_path / "data" / name
    if folder.exists():
        folder.rename(tmp_path / "before")
    folder.symlink_to(documents)
    assert "must be a directory, and not a link" in refusal(tmp_path / "data")
    assert [path.name for path in documents.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["lock", DATABASE_NAME, f"{DATABASE_NAME}-wal", "engine-requests.jsonl"])
@pytest.mark.parametrize("is_link", [False, True])
async def test_a_link_or_directory_in_place_of_a_file_is_refused(tmp_path: Path, name: str, is_link: bool) -> None:
    await used(tmp_path / "data")
    (tmp_path / "precious").write_text("precious")
    path = tmp_path / "data" / name
    path.unlink(missing_ok=True)
    if is_link:
        path.symlink_to(tmp_path / "precious")
    else:
        path.mkdir()
    assert name in refusal(tmp_path / "data")
    assert (tmp_path / "precious").read_text() == "precious"


async def test_a_read_only_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await used(tmp_path)

    def refuse(path: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(data_dir, "_lock", refuse)
    assert refusal(tmp_path) == f"cannot use the data directory {tmp_path}: Read-only file system"


def test_a_refused_directory_is_not_left_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(data_dir, "_close_to_others", lambda root: os.stat(root / "gone"))
        assert "No such file" in refusal(tmp_path)
    open_once(tmp_path)


def test_one_directory_has_one_holder_by_whatever_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    first = DataDir(tmp_path / "data")
    first.open()
    with pytest.raises(DataDirLockedError, match=rf"another neaptide process \({os.getpid()}\)"):
        DataDir(tmp_path / "link").open()
    first.close()
    open_once(tmp_path / "link")


# ---- other users of the machine --------------------------------------------------------------------------


def modes(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in (root, *root.rglob("*")):
        with suppress(FileNotFoundError):  # a batch that has ended loses its files meanwhile
            found[str(path.relative_to(root))] = stat.S_IMODE(path.stat().st_mode)
    return found


def assert_closed(root: Path) -> None:
    for name, mode in modes(root).items():
        assert mode == (0o700 if (root / name).is_dir() else 0o600), name


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
async def test_nothing_is_readable_by_others_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        async with Server(tmp_path / "data") as server:
            batch = await server.create(numbered(2))
            await server.until_given(batch.id)
            found = modes(tmp_path / "data")
            assert {DATABASE_NAME, f"{DATABASE_NAME}-wal", f"{DATABASE_NAME}-shm"} <= set(found)
            ends = ("tokens", "offsets", "prefixes", "replies", "plan", "sha256")
            assert {f"jobs/{batch.id}.{end}" for end in ends} <= set(found)
            assert_closed(tmp_path / "data")
            server.engine.answer(batch.id)
            await server.until_terminal(batch.id)
            async with server.service.files.upload() as upload:
                await upload.write(b"half")
                assert any(name.endswith(".tmp") for name in modes(tmp_path / "data"))
                assert_closed(tmp_path / "data")


async def test_what_was_open_to_others_is_closed_at_start(tmp_path: Path) -> None:
    root = tmp_path / "data"
    async with Server(root) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
    (root / "engine-requests.jsonl").touch()
    (root / "engine-requests.jsonl.1").touch()
    (root / "profiles" / "p.json").touch()
    for name in modes(root):
        (root / name).chmod(0o755 if (root / name).is_dir() else 0o644)
    async with Server(root):
        assert_closed(root)


def test_temporary_files_of_a_server_that_was_killed_are_gone_at_the_next_start(tmp_path: Path) -> None:
    open_once(tmp_path / "data")
    left = tmp_path / "data" / "tmp" / "a-child"
    left.mkdir()
    (left / "0.tokens").write_bytes(b"prompts")
    open_once(tmp_path / "data")
    assert list((tmp_path / "data" / "tmp").iterdir()) == []


def test_the_store_opens_a_directory_that_stood_open(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = Store(tmp_path)
    store.open()
    store.write_blocking(lambda conn: None)
    assert_closed(tmp_path)
    store.close()


def test_a_volume_root_of_another_user_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)

    def forbid(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(data_dir.os, "chmod", forbid)
    open_once(tmp_path)
    assert f"{tmp_path} belongs to another user" in caplog.text
