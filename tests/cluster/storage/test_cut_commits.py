"""COMMITs that are held, cut off, late or lost in a crash of PostgreSQL, with others writing in between.

Every success is durable. What got 503 is there whole or not at all, and repeating it with its Idempotency-Key gives
exactly one, with its bytes. Every batch ends without a restart.
"""

import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa

from neaptide.cluster.batches import chunk_rows, lease_rows
from neaptide.server.batches.storing import batch_rows, file_rows
from neaptide.server.batches.storing.files import UploadForm
from neaptide.server.batches.storing.models import BatchRecord, FileRecord
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.http.errors import ConflictError, NotFoundError
from tests.cluster.storage.commit_proxy import CommitProxy, Harm
from tests.patience import until
from tests.postgres import PostgresServer
from tests.server.batches.fakes import CHAT, FakeClock, Server, jsonl, line, numbered

T = TypeVar("T")
NUM_LINES = 3
PATIENCE_S, AWAY_S = 0.3, 0.6
"""How long a server asks what became of a COMMIT here, and for how long it gets no answer when it shall give up."""
STORING = "neaptide.server.batches.storing"

CALLS: dict[str, tuple[ModuleType, str]] = {
    "upload": (file_rows, "insert_file"),
    "create": (batch_rows, "create_batch"),
    "delete": (file_rows, "delete_file"),
    "cancel": (batch_rows, "request_cancel"),
    "check": (batch_rows, "insert_lines"),
    "fail": (batch_rows, "fail_batch"),
    "begin": (batch_rows, "begin_batch"),
    "result": (batch_rows, "end_lines"),
    "expire": (batch_rows, "expire_overdue"),
    "close": (batch_rows, "close_lines"),
    "finalize": (batch_rows, "begin_finalizing"),
    "finish": (batch_rows, "finish_batch"),
}
SHARED_CALLS = CALLS | {"chunks": (chunk_rows, "lease_chunks"), "batch": (lease_rows, "lease_batch")}
"""The writing operation of each kind; where servers share there are two more."""


@dataclass
class Trial:
    """Servers behind one proxy, of which the COMMIT of the next operation of a kind is done harm to."""

    servers: list[Server]
    proxy: CommitProxy
    clock: FakeClock
    random: Random
    chosen: tuple[str, Harm] | None = None
    number: int = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch, calls: dict[str, tuple[ModuleType, str]]) -> None:
        for kind, (module, name) in calls.items():
            monkeypatch.setattr(module, name, self._noting(kind, getattr(module, name)))

    def _noting(self, kind: str, operation: Callable[..., T]) -> Callable[..., T]:
        def noted(conn: sa.Connection, *args: Any, **kwargs: Any) -> T:
            found = operation(conn, *args, **kwargs)
            if self.chosen is not None and self.chosen[0] == kind and found != []:
                dbapi_connection: Any = conn.connection.driver_connection
                self.proxy.choose(dbapi_connection.info.backend_pid, self.chosen[1])
                self.chosen = None
            return found

        return noted

    async def run(self, kind: str, harm: Harm) -> None:
        self.number += 1
        self.random.shuffle(self.servers)
        done_before = self.proxy.num_done
        for server in self.servers:
            server.engine.auto = kind not in ("cancel", "close", "expire")
        calls = {"upload": self.upload, "create": self.create, "delete": self.delete}
        await calls.get(kind, lambda *chosen: self.whole_batch(*chosen))(kind, harm)
        await until(lambda: self.proxy.num_done > done_before)

    # ---- what a client does ----

    async def upload(self, kind: str, harm: Harm) -> None:
        content = numbered(NUM_LINES) + f"\n{self.number}".encode() * self.number
        self.chosen = (kind, harm)
        record = await tried(lambda: self.send(content))
        if record is not None:
            await self.check_file(record, content)
        again = await repeated(lambda: self.send(content))
        assert record in (None, again)
        await self.check_file(again, content)
        page, _ = await repeated(
            lambda: self.servers[0].service.files.list_page("", purpose=None, limit=50, after=None, ascending=False)
        )
        assert [file.id for file in page if file.filename == f"{self.number}.jsonl"] == [again.id]

    async def send(self, content: bytes) -> FileRecord:
        files = self.servers[0].service.files
        async with files.upload() as upload:
            await upload.write(content)
            form = UploadForm(f"{self.number}.jsonl", "batch")
            return await files.commit(upload, form, "", idempotency_key=f"file {self.number}")

    async def check_file(self, record: FileRecord, content: bytes) -> None:
        for server in self.servers:
            assert await self.read(server, record.id) == content

    async def read(self, server: Server, file_id: str) -> bytes:
        async def read() -> bytes:
            files = server.service.files
            await files.verify(await files.get(file_id, ""))
            return files.path(file_id).read_bytes()

        return await repeated(read)

    async def create(self, kind: str, harm: Harm) -> None:
        file = await repeated(lambda: self.send(numbered(NUM_LINES)))
        self.chosen = (kind, harm)
        record = await tried(lambda: self.make(file))
        if record is not None or self.random.random() < 0.5:
            again = await repeated(lambda: self.make(file))
            assert record is None or record.id == again.id
        for made in await self.batches_of(file):
            await self.check_end(made, "completed")
        assert len(await self.batches_of(file)) <= 1
        assert record is None or [made.id for made in await self.batches_of(file)] == [record.id]

    async def make(self, file: FileRecord, window: str = "24h") -> BatchRecord:
        body = {"endpoint": CHAT, "completion_window": window, "input_file_id": file.id}
        return await self.servers[0].service.create_batch("", body, idempotency_key=f"batch {self.number}")

    async def batches_of(self, file: FileRecord) -> list[BatchRecord]:
        page, _ = await repeated(lambda: self.servers[-1].service.list_batches("", 50, None))
        return [record for record in page if record.input_file_id == file.id]

    async def delete(self, kind: str, harm: Harm) -> None:
        content = numbered(NUM_LINES)
        file = await repeated(lambda: self.send(content))
        self.chosen = (kind, harm)
        deleting = self.servers[0].service.files
        was_deleted = await tried(lambda: is_deleted(deleting.delete(file.id, "")))
        if was_deleted is None and await self.is_there(file):
            await self.check_file(file, content)
        await repeated(lambda: is_deleted(deleting.delete(file.id, "")))
        assert not await self.is_there(file)

    async def is_there(self, file: FileRecord) -> bool:
        try:
            await repeated(lambda: self.servers[-1].service.files.get(file.id, ""))
        except NotFoundError:
            return False
        return True

    async def whole_batch(self, kind: str, harm: Harm) -> None:
        """From its creation to its end; the harm is done on the way."""
        content = jsonl([line("a"), "{"]) if kind == "fail" else numbered(NUM_LINES)
        file = await repeated(lambda: self.send(content))
        if kind not in ("cancel", "close", "expire"):
            self.chosen = (kind, harm)
        record = await repeated(lambda: self.make(file, "1h"))
        if kind in ("cancel", "close", "expire"):
            await until(lambda: sum(map(len, self.given(record))) == NUM_LINES)
            self.chosen = (kind, harm)
        if kind in ("cancel", "close"):
            service = self.servers[0].service
            if await tried(lambda: service.cancel_batch(record.id, "")) is None and self.random.random() < 0.5:
                await repeated(lambda: is_cancelled(service.cancel_batch(record.id, "")))
        elif kind == "expire":
            self.clock.now_s += 3601
        ends = {"cancel": "cancelled", "close": "cancelled", "expire": "expired", "fail": "failed"}
        await self.check_end(record, ends.get(kind, "completed"))

    def given(self, record: BatchRecord) -> list[list[int]]:
        waiting = [server.engine.waiting for server in self.servers]
        return [rows for of_one in waiting for name, rows in of_one.items() if name.startswith(record.id)]

    async def check_end(self, record: BatchRecord, status: str) -> None:
        """The batch ends, and every line stands in its files once."""
        service = self.servers[-1].service
        tried_again = False

        async def has_ended() -> bool:
            nonlocal tried_again
            now = await repeated(lambda: service.get_batch(record.id, ""))
            if status == "cancelled" and now.outcome is None and self.chosen is None and not tried_again:
                # The client was told 503, and the cancel has not happened.
                tried_again = await tried(lambda: is_cancelled(service.cancel_batch(record.id, ""))) is not None
            return now.is_terminal

        await until(has_ended)
        now = await repeated(lambda: service.get_batch(record.id, ""))
        assert now.status == status, now
        lines = []
        for file_id in (now.output_file_id, now.error_file_id):
            lines += [] if file_id is None else (await self.read(self.servers[-1], file_id)).splitlines()
        found = sorted(json.loads(text)["custom_id"] for text in lines)
        assert found == ([] if status == "failed" else [f"c{n}" for n in range(NUM_LINES)])
        assert now.num_completed == (NUM_LINES if status == "completed" else 0)


async def tried(call: Callable[[], Awaitable[T]]) -> T | None:
    """None for 503. Any other error is one of the server's."""
    try:
        return await call()
    except StoreUnavailableError:
        return None


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """As a client does that gets 503."""
    found: list[T] = []

    async def succeeds() -> bool:
        try:
            found.append(await call())
        except StoreUnavailableError:
            return False
        return True

    await until(succeeds)
    return found[0]


async def is_deleted(deletion: Awaitable[None]) -> bool:
    """Where it was deleted before, the client has repeated what had happened."""
    with suppress(NotFoundError):
        await deletion
    return True


async def is_cancelled(cancel: Awaitable[BatchRecord]) -> bool:
    with suppress(ConflictError):
        await cancel
    return True


# ---- the rounds -----------------------------------------------------------------------------------------


@asynccontextmanager
async def trial(
    root: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, is_shared: bool, random: Random
) -> AsyncIterator[Trial]:
    for name, value in {
        "neaptide.cluster.storage.postgres.ASK_PATIENCE_S": PATIENCE_S,
        f"{STORING}.databases.writer.ASK_INTERVAL_S": 0.02,
        f"{STORING}.disk_patience.FIRST_DELAY_S": 0.02,
        f"{STORING}.disk_patience.MAX_DELAY_S": 0.2,
        "neaptide.server.batches.running.job_runner.RETRY_DELAY_S": 0.05,
    }.items():
        monkeypatch.setattr(name, value, raising=False)
    clock = FakeClock()
    async with AsyncExitStack() as stack:
        proxy = stack.enter_context(CommitProxy(postgres, AWAY_S))
        url = proxy.url(postgres.new_database())
        blobs = f"file://{root}/blobs" if is_shared else None
        servers = [
            Server(root / name, clock=clock, store_url=url, blobs_url=blobs, lease_s=2.0)
            for name in ("ab" if is_shared else "a")
        ]
        for server in servers:
            await stack.enter_async_context(server)
        found = Trial(servers, proxy, clock, random)
        found.watch(monkeypatch, SHARED_CALLS if is_shared else CALLS)
        yield found


def rounds(is_shared: bool, random: Random, count: int) -> list[tuple[str, Harm]]:
    """So many of all pairs of a call and a harm, each as often as the others."""
    pairs = list(itertools.product(SHARED_CALLS if is_shared else CALLS, Harm))
    found: list[tuple[str, Harm]] = []
    while len(found) < count:
        found += random.sample(pairs, len(pairs))
    return found[:count]


async def survives(
    root: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, is_shared: bool, seed: int, count: int
) -> None:
    random = Random(seed)
    chosen = rounds(is_shared, random, count)
    async with trial(root, postgres, monkeypatch, is_shared, random) as found:
        for number, (kind, harm) in enumerate(chosen):
            begun_s = time.monotonic()
            print(f"round {number}: {kind}, {harm.name}", end="", flush=True)
            await found.run(kind, harm)
            print(f", {time.monotonic() - begun_s:.1f} s")


@pytest.mark.parametrize("is_shared", [False, True])
async def test_no_success_is_lost_and_no_503_is_half_done(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    await survives(tmp_path, postgres_server, monkeypatch, is_shared, 2, 5)


@pytest.mark.full
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("seed", range(3, 8))
@pytest.mark.parametrize("is_shared", [False, True])
async def test_no_success_is_lost_and_no_503_is_half_done_in_500_rounds(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, is_shared: bool, seed: int
) -> None:
    await survives(tmp_path, postgres_server, monkeypatch, is_shared, seed, 50)
