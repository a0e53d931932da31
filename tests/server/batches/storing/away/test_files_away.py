"""Files that are away for a while, or for good: no line ends for it, and everything goes on when they are back."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from neaptide.server.batches.checking import validation
from neaptide.server.batches.checking.validate import Check, CheckReport, Keep
from neaptide.server.batches.running import finalize
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.store import StoreUnavailableError
from tests.patience import until
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import Server, ThreadChecker, numbered
from tests.server.batches.test_http import app_of, http_client

NUM_LINES = 6
PLAN = (".tokens", ".offsets", ".plan", ".sha256", ".prefixes", ".replies")


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "storing.disk_patience.FIRST_DELAY_S",
        "storing.disk_patience.MAX_DELAY_S",
        "running.state_machine.FIRST_RELOAD_DELAY_S",
        "running.job_runner.RETRY_DELAY_S",
        "running.plans.LOOK_S",
    ):
        monkeypatch.setattr(f"neaptide.server.batches.{name}", 0.01)


class Away:
    """Something of a server's data directory, moved out of it and back."""

    def __init__(self, server: Server, path: Path) -> None:
        self._server = server
        self._path = path
        self._place = path.with_name(f"{path.name}.away") if path.is_dir() else path.parents[2] / path.name

    async def leave(self) -> None:
        self._path.rename(self._place)

    async def come_back(self) -> None:
        self._place.rename(self._path)


class GatedChecker(ThreadChecker):
    """Waits before each check until it may go on."""

    def __init__(self) -> None:
        super().__init__(FakeCompiler("fake"))
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def check(self, check: Check, keep: Keep) -> CheckReport:
        self.begun.set()
        await self.go_on.wait()
        return await super().check(check, keep)


def place_of(server: Server, data_dir: Path, what: str, batch: BatchRecord) -> Path:
    if what == "directory":
        return data_dir
    return server.service.files.path(batch.input_file_id) if what == "input" else data_dir / what


async def replies(server: Server, batch: BatchRecord) -> set[int]:
    """Of everything that asks for what is known."""
    async with http_client(app_of(server)) as client:
        urls = (
            f"/v1/files/{batch.input_file_id}",
            f"/v1/files/{batch.input_file_id}/content",
            "/v1/files",
            f"/v1/batches/{batch.id}",
            "/v1/batches",
        )
        found = [await client.get(url) for url in urls]
        body = {"input_file_id": batch.input_file_id, "endpoint": batch.endpoint, "completion_window": "24h"}
        found.append(await client.post("/v1/batches", json=body))
        found.append(
            await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", numbered(1))})
        )
    assert all("retry-after" in reply.headers for reply in found if reply.status_code == 503)
    return {reply.status_code for reply in found}


async def ends_well(server: Server, batch: BatchRecord) -> None:
    while (await server.get(batch.id)).status != "completed":
        server.engine.answer(batch.id)
        await asyncio.sleep(0.005)
    found, _ = server.results(await server.get(batch.id))
    texts = {name: entry["response"]["body"]["choices"][0]["text"] for name, entry in found.items()}
    assert texts == {f"c{i}": f"text of c{i}"[::-1] for i in range(NUM_LINES)}


@asynccontextmanager
async def away(server: Server, path: Path) -> AsyncIterator[None]:
    one = Away(server, path)
    await one.leave()
    try:
        yield
    finally:
        await one.come_back()


async def in_time(
    data_dir: Path, what: str, phase: str, while_away: Callable[[Server, BatchRecord], Awaitable[None]]
) -> None:
    """A batch that meets the absence in a phase, and ends well after it."""
    checker = GatedChecker()
    async with Server(data_dir, checker=checker) as server:
        batch = await server.create(numbered(NUM_LINES))
        await checker.begun.wait()
        if phase != "checking":
            checker.go_on.set()
            await server.until_given(batch.id)
        if phase == "running":
            server.engine.answer(batch.id, 2)
            await server.until(batch.id, lambda record: record.num_completed == 2)
        if phase == "complete":
            await ends_well(server, batch)
        async with away(server, place_of(server, data_dir, what, batch)):
            checker.go_on.set()
            server.engine.answer(batch.id)
            await while_away(server, batch)
        await ends_well(server, batch)
        await until(lambda: not server.service.storage_failing)


async def seen_from_outside(server: Server, batch: BatchRecord) -> None:
    for _ in range(3):
        assert await replies(server, batch) <= {200, 503}
    await until(lambda: server.service.storage_failing)
    # Only without the directory may a read be refused: then no new connection can be opened.
    with suppress(*() if server.service.store.data_dir.exists() else (StoreUnavailableError,)):
        assert (await server.get(batch.id)).num_failed == 0


@pytest.mark.parametrize("phase", ["checking", "running", "complete"])
@pytest.mark.parametrize("what", ["input", "directory", "files", "jobs"])
async def test_what_is_away_is_503_and_ends_no_line(tmp_path: Path, what: str, phase: str) -> None:
    async def look(server: Server, batch: BatchRecord) -> None:
        if what == "jobs":  # which no reply needs
            assert await replies(server, batch) == {200}
            return
        await seen_from_outside(server, batch)

    await in_time(tmp_path / "data", what, phase, look)


async def test_a_batch_whose_input_is_away_before_it_is_created_waits_for_it(tmp_path: Path) -> None:
    async with Server(tmp_path / "data") as server:
        file = await server.upload(numbered(NUM_LINES))
        async with away(server, server.service.files.path(file.id)):
            batch = await server.create(input_file_id=file.id)
            await until(lambda: server.service._machine.waits_for_disk)
            assert server.service.storage_failing
            assert (await server.get(batch.id)).status == "validating"
        await ends_well(server, batch)


async def test_result_files_wait_for_their_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, write_files = tmp_path / "data" / "files", finalize.write_files

    def tried(*args: object) -> object:
        if files.exists():
            files.rename(tmp_path / "away")
        return write_files(*args)  # type: ignore[arg-type]

    async with Server(tmp_path / "data") as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, NUM_LINES - 1)
        await server.until(batch.id, lambda record: record.num_completed == NUM_LINES - 1)
        monkeypatch.setattr(finalize, "write_files", tried)
        await server.service.cancel_batch(batch.id, "")
        await until(lambda: server.service._machine.waits_for_disk)
        assert (await server.get(batch.id)).status == "cancelling"
        monkeypatch.undo()
        (tmp_path / "away").rename(files)
        record = await server.until_status(batch.id, "cancelled")
        assert (record.num_completed, record.num_failed) == (NUM_LINES - 1, 0)
        server.results(record)


@pytest.mark.parametrize("suffix", PLAN)
async def test_a_plan_that_is_gone_while_a_batch_runs_is_made_again(tmp_path: Path, suffix: str) -> None:
    async with Server(tmp_path / "data") as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 2)
        await server.until(batch.id, lambda record: record.num_completed == 2)
        path = tmp_path / "data" / "jobs" / f"{batch.id}{suffix}"
        before = path.read_bytes()
        path.unlink()
        if suffix in (".tokens", ".offsets"):  # all that anybody reads while it runs
            await server.until_given(batch.id, 2)
            assert path.read_bytes() == before
        await ends_well(server, batch)


async def test_answers_of_changed_prompts_are_not_taken(tmp_path: Path) -> None:
    async with Server(tmp_path / "data") as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        path = tmp_path / "data" / "jobs" / f"{batch.id}.tokens"
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        server.engine.answer(batch.id)
        await server.until_given(batch.id, 2)
        assert path.read_bytes() == content
        await ends_well(server, batch)


@pytest.mark.parametrize("is_cut", [False, True])
async def test_an_input_that_changes_while_replies_need_it_is_waited_for(tmp_path: Path, is_cut: bool) -> None:
    async with Server(tmp_path / "data", stores_replies=False) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        path = server.service.files.path(batch.input_file_id)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if is_cut else content.replace(b"POST", b"PUSH"))
        server.engine.answer(batch.id)
        await until(lambda: batch.input_file_id in server.service.health.away)
        record = await server.get(batch.id)
        assert (record.num_completed, record.num_failed) == (0, 0)
        path.write_bytes(content)
        await ends_well(server, batch)


async def test_a_plan_that_vanishes_or_changes_before_it_is_sealed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal_plan, tried = validation.seal_plan, list[Path]()

    def gone(stem: Path, digest: str) -> None:
        tried.append(stem)
        plan = stem.with_name(f"{stem.name}.plan")
        if len(tried) == 1:
            plan.unlink()
        elif len(tried) == 2:
            plan.write_bytes(plan.read_bytes()[:-1])
        seal_plan(stem, digest)

    monkeypatch.setattr(validation, "seal_plan", gone)
    async with Server(tmp_path / "data") as server:
        batch = await server.create(numbered(NUM_LINES))
        await ends_well(server, batch)
        assert len(tried) == 3


async def test_a_deleted_file_is_404_and_no_fault_of_the_storage(tmp_path: Path) -> None:
    async with Server(tmp_path / "data") as server, http_client(app_of(server)) as client:
        file = await server.upload(numbered(1))
        record = await server.service.files.get(file.id, "")
        await client.delete(f"/v1/files/{file.id}")
        # A reader that had found the row before it was deleted.
        server.service.files.get = lambda *_: _given(record)  # type: ignore[method-assign, assignment]
        assert (await client.get(f"/v1/files/{file.id}/content")).status_code == 404
        assert not server.service.storage_failing


async def _given(record: object) -> object:
    return record


async def test_a_copy_that_is_gone_while_the_blob_is_away_ends_no_line(tmp_path: Path) -> None:
    """On one database with shared storage: SQLite and blobs in a directory."""
    url = f"file://{tmp_path}/blobs"
    async with Server(tmp_path / "data", blobs_url=url, stores_replies=False) as server:
        batch = await server.create(numbered(NUM_LINES))
        await until(lambda: len(server.engine.waiting) == 1)
        (job_id,) = server.engine.waiting
        blobs = tmp_path / "blobs"
        blobs.rename(tmp_path / "elsewhere")
        server.service.files.path(batch.input_file_id).unlink()
        server.engine.answer(job_id)
        await until(lambda: batch.input_file_id in server.service.health.away)
        assert await replies(server, batch) <= {200, 503}
        (tmp_path / "elsewhere").rename(blobs)
        record = await server.until_status(batch.id, "completed")
        found, _ = server.results(record)
        assert len(found) == NUM_LINES
        await until(lambda: not server.service.storage_failing)


async def test_a_directory_that_is_removed_is_noticed_and_nothing_is_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_dir = tmp_path / "data"
    async with Server(data_dir) as server, http_client(app_of(server)) as client:
        file = await server.upload(numbered(1))
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        shutil.rmtree(data_dir)
        assert await replies(server, batch) <= {200, 503}
        body = {"input_file_id": file.id, "endpoint": batch.endpoint, "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=body)).status_code == 503
        assert (await client.post(f"/v1/batches/{batch.id}/cancel")).status_code == 503
        assert (await client.delete(f"/v1/files/{file.id}")).status_code == 503
        await until(lambda: server.service.health.missing)
        data_dir.mkdir()  # as the place where a volume was mounted
        assert (await client.post("/v1/batches", json=body)).status_code == 503
        assert list(data_dir.iterdir()) == []
        assert server.service.health.missing
    assert caplog.text.count("nothing is stored until it returns") == 1


@pytest.mark.parametrize("name", ["neaptide.db", "neaptide.db-wal", "neaptide.db-shm"])
async def test_a_database_file_that_is_away_is_noticed_and_results_wait_for_it(tmp_path: Path, name: str) -> None:
    data_dir = tmp_path / "data"
    async with Server(data_dir) as server:
        batch = await server.create(numbered(NUM_LINES))
        await server.until_given(batch.id)
        async with away(server, data_dir / name):
            server.engine.answer(batch.id)
            async with http_client(app_of(server)) as client:
                body = {"input_file_id": batch.input_file_id, "endpoint": batch.endpoint, "completion_window": "24h"}
                assert (await client.post("/v1/batches", json=body)).status_code == 503
            await until(lambda: server.service.health.missing)
        await until(lambda: not server.service.storage_failing)
        await ends_well(server, batch)
        assert len(server.engine.executed) == NUM_LINES
        await ends_well(server, await server.create(input_file_id=batch.input_file_id))


async def test_an_upload_does_not_go_to_what_covers_the_files(tmp_path: Path) -> None:
    files = tmp_path / "data" / "files"
    async with Server(tmp_path / "data") as server, http_client(app_of(server)) as client:
        await server.upload(numbered(1))
        async with away(server, files):
            files.mkdir()  # as what is mounted over it
            upload = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", numbered(1))}}
            assert (await client.post("/v1/files", **upload)).status_code == 503
            await until(lambda: server.service.health.missing)
            # A trial write of the server may have begun before that.
            await until(lambda: list(files.iterdir()) == [])
            before = files.stat().st_mtime_ns
            server.service.health.refuses_writes = True
            await server.service.files.look_again()
            assert server.service.health.refuses_writes
            assert files.stat().st_mtime_ns == before
        assert (await client.post("/v1/files", **upload)).status_code == 200
