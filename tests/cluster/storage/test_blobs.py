"""Bytes on shared storage: three kinds of it, what a database knows of it, and what is left over there."""

import asyncio
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from neaptide.cli import main
from neaptide.cluster.lease_order import LEASE_S
from neaptide.cluster.sharing import SharedStorage, sharing_of
from neaptide.cluster.storage.blobs import MARK_KEY, Blobs, BlobsUnavailableError, batch_key
from neaptide.durations import DAY_S
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.faults import FileDamagedError, storage_faults
from neaptide.server.batches.storing.offline import Prune, check, leftover_blobs, prune
from neaptide.server.batches.storing.store import Store
from neaptide.server.http.errors import UnavailableError
from tests.s3 import BUCKET
from tests.server.batches.fakes import Server, numbered


@pytest.fixture(params=["file", "memory", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "s3":
        request.getfixturevalue("s3")
    where = {
        "file": f"file://{tmp_path}/blobs",
        "memory": f"memory://{tmp_path.name}",
        "s3": f"s3://{BUCKET}/{tmp_path.name}",
    }
    blobs = Blobs(where[request.param])
    blobs.set_mark("test")
    return blobs


def source(tmp_path: Path, content: bytes = b"content") -> Path:
    path = tmp_path / "source"
    path.write_bytes(content)
    return path


def keys(blobs: Blobs) -> list[str]:
    return sorted(blob.key for blob in blobs.find())


# ---- the storage -----------------------------------------------------------------------------------------


def test_what_is_put_is_fetched_and_removed(blobs: Blobs, tmp_path: Path) -> None:
    blobs.put(source(tmp_path), "batch_1/1-a.jsonl")
    blobs.put(source(tmp_path, b""), "batch_1/1-b.jsonl")
    target = tmp_path / "target"
    blobs.fetch("batch_1/1-a.jsonl", target, tmp_path)
    assert target.read_bytes() == b"content"
    assert target.stat().st_mode & 0o777 == 0o600
    assert keys(blobs) == ["batch_1/1-a.jsonl", "batch_1/1-b.jsonl"]
    blobs.remove("batch_1/1-a.jsonl")
    blobs.remove("batch_1/1-a.jsonl")
    assert keys(blobs) == ["batch_1/1-b.jsonl"]
    assert blobs.mark() == "test"


def test_a_blob_that_is_not_there_leaves_nothing_behind(blobs: Blobs, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        blobs.fetch("batch_1/none", tmp_path / "target", tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "blobs"] == []


def test_a_directory_that_is_not_mounted_is_no_blank_storage(tmp_path: Path) -> None:
    blobs = Blobs(f"file://{tmp_path}/blobs")
    blobs.set_mark("test")
    blobs.put(source(tmp_path), "files/file-1")
    (tmp_path / "blobs").rename(tmp_path / "elsewhere")
    (tmp_path / "blobs").mkdir()
    for use in (
        lambda: blobs.put(source(tmp_path), "files/file-2"),
        lambda: blobs.fetch("files/file-1", tmp_path / "target", tmp_path),
        lambda: blobs.remove("files/file-1"),
    ):
        with pytest.raises(BlobsUnavailableError, match="is not there"):
            use()
    assert list((tmp_path / "blobs").iterdir()) == []


def test_keys_of_a_batch_are_new_each_time() -> None:
    first, second = batch_key("batch_1", 3), batch_key("batch_1", 3)
    assert first.startswith("batch_1/3-")
    assert first != second


def test_only_its_owner_reads_a_blob(tmp_path: Path) -> None:
    blobs = Blobs(f"file://{tmp_path}/blobs")
    blobs.set_mark("test")
    blobs.put(source(tmp_path), "files/file-1")
    assert (tmp_path / "blobs" / "files" / "file-1").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "blobs").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("url", "message"), [("/plain/path", "need an address"), ("nothing://x", "there is no blob storage at nothing://")]
)
def test_an_address_that_is_none_is_told_at_once(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=message):
        Store(tmp_path, sharing_of(None, url))


# ---- the database and its storage ------------------------------------------------------------------------


def opened(root: Path, name: str, blobs: str | None = "blobs") -> Store:
    store = Store(root / name, SharedStorage(None, None if blobs is None else f"file://{root}/{blobs}", LEASE_S))
    store.open()
    return store


def test_a_database_knows_its_storage(tmp_path: Path) -> None:
    opened(tmp_path, "a").close()
    with pytest.raises(StoreError, match="files are on shared storage; give its address with --blobs"):
        opened(tmp_path, "a", None)
    with pytest.raises(StoreError, match="is not the storage of this database"):
        opened(tmp_path, "a", "others")
    with pytest.raises(StoreError, match="is the storage of another database"):
        opened(tmp_path, "b")
    opened(tmp_path, "a").close()


async def test_a_database_with_files_of_its_own_is_not_shared(tmp_path: Path) -> None:
    async with Server(tmp_path / "a") as server:
        await server.upload(numbered(1))
    with pytest.raises(StoreError, match="use a new database with --blobs"):
        opened(tmp_path, "a")
    assert not (tmp_path / "blobs").exists()


# ---- files -----------------------------------------------------------------------------------------------


def sharing(root: Path, **settings: Any) -> Server:
    return Server(root / "a", blobs_url=f"file://{root}/blobs", **settings)


async def test_a_lost_or_damaged_copy_is_fetched_again(tmp_path: Path) -> None:
    async with sharing(tmp_path) as server:
        record = await server.upload(numbered(3))
        files = server.service.files
        for harm in (files.path(record.id).unlink, lambda: files.path(record.id).write_bytes(b"changed")):
            harm()
            await files.verify(record)
            assert files.path(record.id).read_bytes() == numbered(3)


async def test_a_damaged_blob_is_not_served(tmp_path: Path) -> None:
    async with sharing(tmp_path) as server:
        record = await server.upload(numbered(3))
        server.service.files.path(record.id).unlink()
        (tmp_path / "blobs" / str(record.blob)).write_bytes(b"changed")
        with pytest.raises(FileDamagedError):
            await server.service.files.verify(record)


async def test_an_upload_that_the_storage_does_not_take_is_503_and_leaves_nothing(tmp_path: Path) -> None:
    # Without the server's own trial write, which may be there for a moment.
    async with sharing(tmp_path, tick_s=DAY_S) as server:
        (tmp_path / "blobs" / MARK_KEY).unlink()
        with pytest.raises(UnavailableError), storage_faults(server.service.health):
            await server.upload(numbered(3))
        assert (await server.service.files.list_page("", purpose=None, limit=9, after=None, ascending=True))[0] == []
        assert list(server.service.files.directory.iterdir()) == []


async def test_a_deleted_file_leaves_no_blob(tmp_path: Path) -> None:
    async with sharing(tmp_path) as server:
        record = await server.upload(numbered(3))
        (blob,) = (tmp_path / "blobs" / "files").iterdir()
        assert blob.name == record.id
        await server.service.files.delete(record.id, "")
        assert [path.name for path in (tmp_path / "blobs").iterdir()] == [MARK_KEY]


async def test_an_ended_batch_leaves_its_input_and_its_results(tmp_path: Path) -> None:
    async with sharing(tmp_path) as server:
        server.engine.auto = True
        record = await server.until_terminal((await server.create(numbered(3))).id)
        assert record.status == "completed"
    found = keys(Blobs(f"file://{tmp_path}/blobs"))
    assert len(found) == 2
    assert found[0].startswith(f"{record.id}/")
    assert found[1] == f"files/{record.input_file_id}"


# ---- leftovers -------------------------------------------------------------------------------------------


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A directory with a file, a blob that no row names and is two days old, and one that was put just now."""
    blobs = Blobs(f"file://{tmp_path}/blobs")

    async def work() -> None:
        async with sharing(tmp_path) as server:
            record = await server.upload(numbered(3))
            blobs.put(source(tmp_path), "batch_0/1-old.jsonl")
            blobs.put(source(tmp_path), "batch_0/1-new.jsonl")
            two_days_ago = time.time() - 2 * DAY_S
            for key in (str(record.blob), "batch_0/1-old.jsonl"):
                os.utime(tmp_path / "blobs" / key, (two_days_ago, two_days_ago))

    asyncio.run(work())
    return tmp_path


def test_old_blobs_without_a_row_are_found_and_moved_aside(used: Path) -> None:
    store = opened(used, "a")
    try:
        assert leftover_blobs(store) == ["batch_0/1-old.jsonl"]
        assert check(store).problems == ["batch_0/1-old.jsonl: no record has this blob; prune moves it aside"]
        before = keys(store.blobs) if store.blobs is not None else []
        prune(store, Prune())
        assert store.blobs is not None
        assert set(before) - set(keys(store.blobs)) == {"batch_0/1-old.jsonl"}
        (aside,) = set(keys(store.blobs)) - set(before)
        assert re.fullmatch(r"moved-aside/[0-9TZ-]+/batch_0/1-old\.jsonl", aside)
        assert check(store).problems == []
        prune(store, Prune(moved_aside=True))
        assert set(keys(store.blobs)) == set(before) - {"batch_0/1-old.jsonl"}
    finally:
        store.close()


def test_check_reads_blobs_and_not_their_copies(used: Path) -> None:
    store = opened(used, "a")
    try:
        prune(store, Prune())
        shutil.rmtree(store.files_dir)
        store.files_dir.mkdir()
        assert check(store).problems == []
        (blob,) = (used / "blobs" / "files").iterdir()
        blob.write_bytes(b"changed")
        assert check(store).problems == [f"files/{blob.name}: its bytes differ from the stored ones"]
        blob.unlink()
        assert [text.partition(":")[0] for text in check(store).problems] == [f"files/{blob.name}"]
    finally:
        store.close()


def test_the_data_command_needs_the_database_of_the_blobs(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments: list[Any] = ["data", "check", "--data-dir", str(used / "a"), "--blobs", f"file://{used}/blobs"]
    assert main(arguments) == 2
    assert "give --store too" in capsys.readouterr().err
