"""What has to be on the disk before the next thing may happen: a power cut takes whatever was not synced."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neaptide.server.batches.checking.job_files import SealedPlan
from neaptide.server.batches.running import ending, finalize, plans
from neaptide.server.batches.storing import batch_rows, file_rows
from neaptide.server.batches.storing.faults import FileDamagedError
from neaptide.server.batches.storing.models import LineResult, LineState, NewBatch, NewLine, StoredUsage
from neaptide.server.batches.storing.store import Store
from tests.patience import PATIENCE_S
from tests.server.batches.fakes import Server, jsonl, line, numbered


class Calls:
    """What reached the disk and the database, in order: ``sync NAME SIZE``, ``rename NAME``, ``row``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.seen: list[str] = []
        sync, rename = os.fsync, Path.rename

        def fsync(fd: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            self.seen.append(f"sync {path.name}" + ("" if path.is_dir() else f" {path.stat().st_size}"))
            sync(fd)

        def renamed(path: Path, target: Path) -> Path:
            self.seen.append(f"rename {path.name} {target.name}")
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "rename", renamed)

    def watch(self, module: Any, name: str) -> None:
        """Notes when an operation on the database is made."""
        operation: Callable[..., object] = getattr(module, name)

        def noted(*args: object) -> object:
            self.seen.append(name)
            return operation(*args)

        self._monkeypatch.setattr(module, name, noted)

    def between(self, first: str, last: str) -> list[str]:
        """From the first call that begins so to the first one that is so."""
        start = next(index for index, call in enumerate(self.seen) if call.startswith(first))
        return self.seen[start : self.seen.index(last) + 1]


async def test_an_upload_is_on_disk_before_it_has_its_name_and_that_before_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        calls = Calls(monkeypatch)
        calls.watch(file_rows, "insert_file")
        file = await server.upload(b"x" * 3_000_000)
        sync, rename, *rest = calls.between("sync upload-", "insert_file")
        temporary = sync.split()[1]
        assert sync == f"sync {temporary} 3000000"
        assert rename == f"rename {temporary} {file.id}"
        assert rest == ["sync files", "insert_file"]


async def test_result_files_are_on_disk_before_they_have_their_names_and_those_before_the_batch_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("a"), line("hot", temperature=9)]))
        await server.until_given(batch.id)
        calls = Calls(monkeypatch)
        calls.watch(batch_rows, "finish_batch")
        server.engine.answer(batch.id)
        record = await server.until_terminal(batch.id)
        wanted = []
        for file_id in (record.output_file_id, record.error_file_id):
            size = len(server.bytes_of(file_id))
            wanted += [f"sync {file_id}.tmp {size}", f"rename {file_id}.tmp {file_id}", "sync files"]
        assert calls.between("sync file-", "finish_batch") == [*wanted, "finish_batch"]


async def test_the_plan_of_a_job_is_on_disk_before_its_batch_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        calls = Calls(monkeypatch)
        calls.watch(batch_rows, "begin_batch")
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        sizes = {path.suffix: path.stat().st_size for path in (tmp_path / "jobs").iterdir()}
        found = calls.between(f"sync {batch.id}", "begin_batch")
        plan = [
            f"sync {batch.id}{suffix} {sizes[suffix]}"
            for suffix in (".tokens", ".offsets", ".replies", ".prefixes", ".plan")
        ]
        assert found == [*plan, "sync jobs", f"sync {batch.id}.sha256 64", "sync jobs", "begin_batch"]


# ---- an end in the middle --------------------------------------------------------------------------------


@pytest.mark.parametrize("lines_before", [0, 3])
def test_a_stop_ends_finalizing_between_lines_and_leaves_nothing(tmp_path: Path, lines_before: int) -> None:
    store = Store(tmp_path)
    store.open()
    new = NewBatch("batch_1", "", "", "/v1/chat/completions", "file-1", "24h", None, None, 100, 200)
    store.write_blocking(batch_rows.create_batch, new, ("file-o", "file-e"))
    lines = [NewLine(n, f"c{n}", 0, 1, n - 1, 1) for n in range(1, 6)]
    store.write_blocking(batch_rows.insert_lines, new.id, lines)
    ended = [LineResult(n, LineState.COMPLETED, 200, "req_1", "{}", StoredUsage(1, 0, 1)) for n in range(1, 6)]
    store.write_blocking(batch_rows.end_lines, new.id, ended)
    asked: list[bool] = []

    def should_stop() -> bool:
        asked.append(len(asked) == lines_before)
        return asked[-1]

    record = store.read_blocking(batch_rows.require_batch, new.id)
    with pytest.raises(finalize.FinalizeStoppedError):
        finalize.write_files(store, record, tmp_path / "files", should_stop, 150, 3600)
    assert len(asked) == lines_before + 1
    assert list((tmp_path / "files").iterdir()) == []
    store.close()


@pytest.mark.acceptance("A20", "cancel while a batch is loaded")
async def test_a_batch_that_is_cancelled_while_it_is_loaded_never_reaches_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    read_sealed_plan = plans.read_sealed_plan

    def slowly(stem: Path) -> SealedPlan:
        found = read_sealed_plan(stem)
        if not go_on.is_set():
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(plans, "read_sealed_plan", slowly)
    monkeypatch.setattr(ending, "remove_plan", lambda stem: None)  # what has been mapped can still be read
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        await begun.wait()
        await server.service.cancel_batch(batch.id, "")
        record = await server.until_terminal(batch.id)
        go_on.set()
        other = await server.create(numbered(1))
        await server.until_given(other.id)
        assert server.engine.added(batch.id) == []
        assert list(server.service._machine._runner._jobs) == [other.id], "nothing is kept of it"
        assert (record.status, record.num_completed, record.num_failed) == ("cancelled", 0, 0)


# ---- the disk changes ------------------------------------------------------------------------------------


async def test_a_file_that_changes_after_it_was_verified_is_verified_again(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        file = await server.upload(b"right\n")
        path = server.service.files.path(file.id)
        await server.service.files.verify(file)
        path.write_bytes(b"wrong\n")
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        with pytest.raises(FileDamagedError):
            await server.service.files.verify(file)
        path.write_bytes(b"right\n")
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 2))
        await server.service.files.verify(file)
