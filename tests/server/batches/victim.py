"""A batch server that is killed: one process with service, fake engine and client, traced by strace.

The process is forked from a server that has imported everything, so that a life takes a second. What the client
was told and what the engine ran goes to the test through a socket, which a kill cannot take back.
"""

import asyncio
import hashlib
import json
import logging
import multiprocessing
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

from neaptide.server.batches.objects import batch_object
from neaptide.server.batches.running import job_runner as runner
from neaptide.server.batches.storing import disk_patience as retry
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.files import UploadForm
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.errors import ApiError
from tests.patience import PATIENCE_S, Stopwatch, until_here
from tests.server.batches.fakes import CHAT, FakeEngine, Server, jsonl, line, numbered
from tests.server.batches.invariants import Facts

NUM_LINES = 200
INPUT = numbered(NUM_LINES - 1) + jsonl([line("refused", temperature=9)])
INPUT_SHA256 = hashlib.sha256(INPUT).hexdigest()
NUM_CANCELLED_LINES = 20
ROWS_A_TURN = 8
STRACE = shutil.which("strace")
Tell = Callable[[str, object], None]


class TellingEngine(FakeEngine):
    """Works off what it is given, a few rows at a time, and says so before the result can be known.

    ``leaves`` is the size of a job that it begins and never ends.
    """

    def __init__(self, client: EngineClient, tell: Tell, leaves: int = 0) -> None:
        super().__init__(client)
        self._tell, self._leaves = tell, leaves
        self.auto = True
        self.row_s = 0.25

    def answer(self, batch_id: str, count: int | None = None) -> None:
        waiting = self.waiting.get(batch_id, [])
        rows = waiting[:ROWS_A_TURN]
        if rows:
            leave = len(waiting) == self._leaves
            self._tell("executed", [f"{batch_id}:{row}" for row in rows])
            super().answer(batch_id, len(rows))
            if not leave:
                asyncio.get_running_loop().call_later(0.001, self.answer, batch_id)


class Client:
    """One client's morning with the service; tells what was acknowledged."""

    def __init__(self, server: Server, tell: Tell) -> None:
        self._server, self._service, self._tell = server, server.service, tell

    async def upload(self, content: bytes) -> str:
        file = await self._server.upload(content)
        self._tell("file", [file.id, hashlib.sha256(content).hexdigest()])
        return file.id

    async def create(self, file_id: str, num_lines: int, key: str | None = None) -> str:
        body = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file_id}
        record = await self._service.create_batch("", body, idempotency_key=key)
        self._tell("batch", [record.id, num_lines, key])
        self._see(record)
        return record.id

    async def watch(self, batch_id: str) -> BatchRecord:
        while True:
            record = await self._service.get_batch(batch_id, "")
            self._see(record)
            if record.is_terminal:
                self._tell("receipt", await self._service.receipt(batch_id, ""))
                return record
            await asyncio.sleep(0.02)

    def _see(self, record: BatchRecord) -> None:
        self._tell("seen", batch_object(record, self._service.outlooks))

    async def look_in(self) -> None:
        """Hardly anything, for a life that is mostly its first start and its end."""
        await self.upload(numbered(1))

    async def work(self) -> None:
        """Two batches, one of them cancelled, beside an upload that takes as long as they do."""
        async with self._service.files.upload() as slow_upload:
            await slow_upload.write(b"\n" * (1 << 20))
            file_id = await self.upload(INPUT)
            batch_id = await self.create(file_id, NUM_LINES, key="retried")
            assert await self.create(file_id, NUM_LINES, key="retried") == batch_id
            other_file_id = await self.upload(numbered(NUM_CANCELLED_LINES))
            other_id = await self.create(other_file_id, NUM_CANCELLED_LINES)
            await self._server.until(other_id, lambda found: found.num_completed > 0)
            await self._service.cancel_batch(other_id, "")
            self._tell("cancelled", other_id)
            record = await self.watch(batch_id)
            for found in (record.output_file_id, record.error_file_id):
                if found is not None:
                    digest = hashlib.sha256(self._service.files.path(found).read_bytes()).hexdigest()
                    self._tell("file", [found, digest])
            await self.watch(other_id)
            self._tell("deleting", other_file_id)
            await self._service.files.delete(other_file_id, "")
            self._tell("deleted", other_file_id)
            await slow_upload.write(b"\n" * (1 << 20))
            file = await self._service.files.commit(slow_upload, UploadForm("slow.jsonl", "batch"), "")
            self._tell("file", [file.id, file.sha256])


def live(data_dir: Path, scene: str, patience_s: float, go: socket.socket, told: socket.socket) -> None:
    """The victim's life, from the moment when the tracer is there. ``scene`` names a method of ``Client``."""

    def tell(kind: str, value: object) -> None:
        told.sendall(json.dumps([kind, value]).encode() + b"\n")

    async def main() -> None:
        # One thread for files, and one that writes the database: each has a sequence of calls to be killed at.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        server = Server(data_dir)
        server.engine = TellingEngine(server.client, tell, leaves=NUM_CANCELLED_LINES)
        try:
            async with server, asyncio.timeout(patience_s):
                await getattr(Client(server, tell), scene)()
        except (ApiError, OSError, StoreError, StoreUnavailableError, TimeoutError) as error:
            tell("refused", type(error).__name__)

    logging.disable()  # its writes are none of the calls that are meant
    runner.RETRY_DELAY_S = retry.FIRST_DELAY_S = 0.01
    go.recv(2)
    asyncio.run(main())


class Victim:
    """A life under strace. ``inject`` is strace's own language: ``pwrite64:signal=KILL:when=3``."""

    _context = multiprocessing.get_context("forkserver")

    def __init__(self, data_dir: Path, facts: Facts, trace: Path) -> None:
        self._context.set_forkserver_preload([__name__])
        self._data_dir, self.facts, self._trace = data_dir, facts, trace
        self.refusals: list[str] = []

    def run(
        self, scene: str, syscalls: Sequence[str], inject: str | None = None, patience_s: float = PATIENCE_S
    ) -> int | None:
        """Lives until the end, the kill or the end of the client's patience; returns the exit code, -9 for killed."""
        timeout_s = patience_s + PATIENCE_S
        with ExitStack() as stack:
            go, go_end = (stack.enter_context(end) for end in socket.socketpair())
            told, told_end = (stack.enter_context(end) for end in socket.socketpair())
            args = (self._data_dir, scene, patience_s, go_end, told_end)
            process = self._context.Process(target=live, args=args, daemon=True)
            process.start()
            tracer = self._attach(process, syscalls, inject)
            go.sendall(b"go")
            go_end.close()
            told_end.close()
            told.settimeout(timeout_s)
            try:
                for line in stack.enter_context(told.makefile("rb")):
                    self._note(*json.loads(line))
            finally:
                process.join(timeout_s)
                process.kill()
                process.join()
                tracer.wait(PATIENCE_S)
        return process.exitcode

    def _attach(self, process: BaseProcess, syscalls: Sequence[str], inject: str | None) -> "subprocess.Popen[bytes]":
        assert STRACE is not None
        command = [STRACE, "-f", "-qq", "-y", "-o", str(self._trace), "-p", str(process.pid)]
        command += ["-e", f"trace={','.join(syscalls)}"]
        command += ["-e", f"inject={inject}"] if inject else []
        tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        status = Path(f"/proc/{process.pid}/status")
        until_here(lambda: tracer.poll() is not None or "TracerPid:\t0\n" not in status.read_text())
        assert tracer.poll() is None, "strace cannot attach"
        return tracer

    def _note(self, kind: str, value: object) -> None:
        note(self.facts, kind, value)
        if kind == "refused":
            self.refusals.append(str(value))


def note(facts: Facts, kind: str, value: object) -> None:
    """Adds what a client was told, or an engine did, to the facts."""
    match kind, value:
        case "file", [file_id, digest]:
            assert facts.files.setdefault(file_id, digest) == digest
        case "batch", [batch_id, num_lines, key]:
            facts.batches[batch_id] = num_lines
            if key is not None:
                assert facts.keys.setdefault(key, batch_id) == batch_id
        case "seen", dict(shown):
            facts.seen.setdefault(shown["id"], []).append(shown)
        case "receipt", dict(receipt):
            facts.receipts.setdefault(receipt["id"], []).append(receipt)
        case "cancelled", str(batch_id):
            facts.cancelled.add(batch_id)
        case "deleting", str(file_id):
            facts.deleting.add(file_id)
        case "deleted", str(file_id):
            facts.deleted.add(file_id)
        case "executed", list(rows):
            facts.executions.update(rows)


async def recover(data_dir: Path, facts: Facts) -> float:
    """The next life, unharmed, until nothing is left to do; returns seconds from ready until all had ended."""

    def tell(kind: str, value: object) -> None:
        note(facts, kind, value)

    server = Server(data_dir)
    server.engine = TellingEngine(server.client, tell)
    async with server:
        watch = Stopwatch()
        client = Client(server, tell)
        file_id = next((found for found, digest in facts.files.items() if digest == INPUT_SHA256), None)
        if file_id is not None:  # the client does not know whether its create went through
            await client.create(file_id, NUM_LINES, key="retried")
        records, _ = await server.service.list_batches("", 100, None)
        for record in records:
            await client.watch(record.id)
        assert sum(record.input_file_id == file_id for record in records) <= 1
        return watch.seconds
