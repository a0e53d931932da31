"""A disk that is full or broken: nothing is called done that is not, and what was called done is there afterwards.

Strace makes single system calls of the service fail; what it cannot reach is made to fail by hand.
"""

import asyncio
import errno
import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import BinaryIO

import pytest

from neaptide.durations import DAY_S
from neaptide.server.batches.storing.data_dir import DATABASE_NAME
from neaptide.server.batches.storing.files import Upload
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import StoreUnavailableError
from tests.patience import until
from tests.server.batches.fakes import Server, jsonl, line, numbered
from tests.server.batches.invariants import Facts, durable_rows, violations
from tests.server.batches.test_http import app_of, http_client
from tests.server.batches.test_kill_sweep import needs_strace, points_of, prepare
from tests.server.batches.victim import Victim, recover

WRITES = ("write", "pwrite64", "rename", "fsync", "fdatasync")
SEED = 9
NO_SPACE = dict.fromkeys(("ENOSPC", "EDQUOT", "EFBIG"), (507, "insufficient_storage", "60"))
AWAY = ("EACCES", "EIO", "EMFILE", "ENFILE", "ENODEV", "ENOENT", "ENOTCONN", "EPERM", "EROFS", "ESTALE", "ETIMEDOUT")


def survives(root: Path, syscall: str, fault: str, patience_s: float) -> list[str]:
    """One life in which calls fail, one in which they do not, and the judgement; what the client was refused."""
    data_dir, facts = prepare(root, "work"), Facts()
    victim = Victim(data_dir, facts, root / "trace")
    assert victim.run("work", [syscall], f"{syscall}:{fault}", patience_s) == 0
    durable, before = durable_rows(data_dir), Counter(facts.executions)
    asyncio.run(recover(data_dir, facts))
    assert not set(facts.executions - before) & durable
    # A row may run again after a commit that failed, so B7 allows one more for the fault.
    assert violations(data_dir, facts, crashes=1) == [], f"{syscall} {fault}"
    return victim.refusals


@needs_strace
@pytest.mark.full
@pytest.mark.acceptance("A9", "EIO at a system call of database or files, seeded", count=8)
def test_io_errors_are_never_success(tmp_path: Path) -> None:
    points = [point for point in points_of(tmp_path / "work", "work") if point[1] in WRITES]
    for _, syscall, number in random.Random(SEED).sample(points, 8):
        survives(tmp_path / f"{syscall}-{number}", syscall, f"error=EIO:when={number}", 4.0)


@needs_strace
@pytest.mark.full
@pytest.mark.parametrize("syscall", WRITES)
@pytest.mark.acceptance("A9", "EIO at every system call of database or files, by name of the call")
def test_an_io_error_at_every_call(tmp_path: Path, syscall: str) -> None:
    for _, name, number in points_of(tmp_path / "work", "work"):
        if name == syscall:
            survives(tmp_path / str(number), syscall, f"error=EIO:when={number}", 10.0)


@needs_strace
@pytest.mark.acceptance("A8", "disk full from a write on, then free again")
@pytest.mark.parametrize(
    ("syscall", "number"), [("pwrite64", 60), pytest.param("pwrite64", 150, marks=pytest.mark.full), ("write", 12)]
)
def test_a_full_disk_pauses_and_loses_nothing(tmp_path: Path, syscall: str, number: int) -> None:
    assert survives(tmp_path, syscall, f"error=ENOSPC:when={number}+", 2.0)


@pytest.mark.acceptance("A8", "results that the disk does not take: batches pause and go on")
async def test_batches_pause_until_the_disk_takes_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.job_runner.RETRY_DELAY_S", 0.01)
    monkeypatch.setattr("neaptide.server.batches.running.job_runner.MAX_UNDURABLE_RESULTS", 4)
    async with Server(tmp_path) as server:
        disk = FullDisk(server, monkeypatch)
        batch = await server.create(numbered(12))
        other = await server.create(numbered(2))
        await server.until_given(batch.id)
        await server.until_given(other.id)
        disk.full = True
        for _ in range(4):
            server.engine.answer(batch.id, 1)
        await until(lambda: not server.engine.waiting)
        # Writes other than results still succeed on this disk, and say for a moment that it is well.
        await until(lambda: server.service.storage_failing)
        assert len(server.engine.executed) == 4
        disk.full = False
        for batch_id in (batch.id, other.id):
            await until(lambda given=batch_id: given in server.engine.waiting)  # type: ignore[misc]
            server.engine.answer(batch_id)
            server.results(await server.until_status(batch_id, "completed"))
        assert not server.service.storage_failing
        assert max(Counter(server.engine.executed).values()) == 1


class FullDisk:
    """Refuses results while it is full."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        store = server.service.store
        write = store.write_grouped

        async def write_grouped(operation: object, rows: int) -> object:
            store._failing["write"] = self.full
            if self.full:
                raise StoreUnavailableError("database or disk is full")
            return await write(operation, rows)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "write_grouped", write_grouped)


@pytest.mark.acceptance("A8", "upload to a full disk")
@pytest.mark.acceptance("A9", "upload to a broken disk")
@pytest.mark.parametrize("name", [*NO_SPACE, *AWAY])
async def test_an_upload_that_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    number = getattr(errno, name)

    def refuse(self: Upload, target: Path) -> None:
        raise OSError(number, "injected")

    monkeypatch.setattr(Upload, "rename", refuse)
    async with Server(tmp_path, tick_s=DAY_S) as server, http_client(app_of(server)) as client:
        reply = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"x")})
        status, code, retry_after = NO_SPACE.get(name, (503, "storage_unavailable", "2"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
        assert reply.headers["retry-after"] == retry_after
        assert server.service.storage_failing
        assert (await client.get("/v1/files")).json()["data"] == []
        await server.service.files.look_again()  # a write of its own succeeds
        assert not server.service.storage_failing
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("name", ["ENOENT", "EACCES", "EDQUOT"])
async def test_a_file_that_the_disk_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        file = await server.upload(b"x")
        open_here = server.service.files.open_here

        def refuse(record: FileRecord) -> BinaryIO:
            raise OSError(getattr(errno, name), "injected")

        monkeypatch.setattr(server.service.files, "open_here", refuse)
        assert (await client.get(f"/v1/files/{file.id}/content")).status_code == NO_SPACE.get(name, (503,))[0]
        assert server.service.storage_failing
        monkeypatch.setattr(server.service.files, "open_here", open_here)
        await until(lambda: not server.service.storage_failing)  # looked at again without being asked
        assert (await client.get(f"/v1/files/{file.id}/content")).content == b"x"


@pytest.mark.acceptance("A9", "a directory whose sync fails after the rename of an upload")
async def test_a_failed_sync_after_the_rename_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(tmp_path) as server:

        def broken(path: Path) -> None:
            raise OSError(errno.EIO, "injected")

        monkeypatch.setattr("neaptide.server.batches.storing.files.sync_directory", broken)
        with pytest.raises(OSError, match="injected"):
            await server.upload(numbered(1))
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.acceptance("A9", "a batch whose file cannot be read, again and again")
async def test_a_batch_whose_file_only_gives_io_errors_waits_until_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.batches.storing.disk_patience.FIRST_DELAY_S", 0.001)
    monkeypatch.setattr("neaptide.server.batches.storing.disk_patience.MAX_DELAY_S", 0.001)
    async with Server(tmp_path) as server:
        open_here, tried = server.service.files.open_here, list[str]()

        def broken(record: FileRecord) -> BinaryIO:
            tried.append(record.id)
            if len(tried) < 20:
                raise OSError(errno.EIO, "injected")
            return open_here(record)

        monkeypatch.setattr(server.service.files, "open_here", broken)
        batch = await server.create(numbered(1))
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        server.results(await server.until_status(batch.id, "completed"))
        assert len(tried) >= 20


@pytest.mark.acceptance("A9", "finalizing that fails and is tried again on a new file")
async def test_a_result_file_that_fails_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.storing.disk_patience.FIRST_DELAY_S", 0.001)
    failures = iter([True, True])
    seen: list[int] = []
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("a")]))
        await server.until_given(batch.id)

        def sometimes(path: Path) -> None:
            seen.append(len(list(path.glob("*.tmp"))))
            if next(failures, False):
                raise OSError(errno.EIO, "injected")

        monkeypatch.setattr("neaptide.server.batches.running.finalize.sync_directory", sometimes)
        server.engine.answer(batch.id)
        server.results(await server.until_status(batch.id, "completed"))
        assert seen == [0, 0, 0]


@pytest.mark.acceptance("A11", "database locked by another process")
async def test_a_locked_database_is_waited_for_then_503_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.batches.storing.databases.sqlite.BUSY_TIMEOUT_S", 0.2)
    async with Server(tmp_path) as server, http_client(app_of(server)) as client:
        batch = await server.create(numbered(1))
        await server.until_given(batch.id)
        holder = sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)
        holder.execute("begin immediate")
        reply = await client.post(f"/v1/batches/{batch.id}/cancel")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
        assert "retry-after" in reply.headers
        assert server.service.storage_failing
        assert (await client.get(f"/v1/batches/{batch.id}")).json()["status"] == "in_progress"
        holder.execute("rollback")
        holder.close()
        assert (await client.post(f"/v1/batches/{batch.id}/cancel")).status_code == 200
        await server.until_status(batch.id, "cancelled")
        await until(lambda: not server.service.storage_failing)


async def test_a_batch_whose_plan_the_disk_refuses_to_seal_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stem: Path, digest: str) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("neaptide.server.batches.checking.validation.seal_plan", refuse)
    monkeypatch.setattr("neaptide.server.batches.storing.disk_patience.FIRST_DELAY_S", 0.01)
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(3))
        await until(lambda: server.service.storage_failing)
        await server.service.cancel_batch(batch.id, "")
        server.results(await server.until_status(batch.id, "cancelled"))
        await until(lambda: not list((tmp_path / "jobs").iterdir()))
