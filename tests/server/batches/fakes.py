"""A batch service on a real EngineClient, with an engine whose every word the test decides."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from neaptide.cluster.lease_order import LEASE_S
from neaptide.cluster.sharing import sharing_of
from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    CancelBatch,
    DeviceCharge,
    EngineReady,
    RecentSteps,
    RequestOutput,
    StepOutputs,
    ToEngine,
)
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import FinishReason
from neaptide.engine.row_id import RowId
from neaptide.server.batches.checking.validate import Check, Checker, CheckReport, Keep, Validator
from neaptide.server.batches.lines import LineCompiler
from neaptide.server.batches.planning.planning import MakesPlans
from neaptide.server.batches.served import NO_LIMIT
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.storing.files import UploadForm
from neaptide.server.batches.storing.housekeeping import Housekeeping
from neaptide.server.batches.storing.models import TERMINAL, BatchRecord, FileRecord, NewLine
from neaptide.server.batches.wiring import BatchSettings, Clocks
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.deaths import Evidence
from tests.patience import until
from tests.server.batches.fake_compiler import FakeCompiler

CHAT = "/v1/chat/completions"
READY = EngineReady("m", "cpu", "float32", 256, 1024, 16, 64, [0])


class ThreadChecker:
    """Checks files in a thread of this process: no worker to be started for every test."""

    def __init__(self, compiler: LineCompiler) -> None:
        self._compiler = compiler

    async def check(self, check: Check, keep: Keep) -> CheckReport:
        loop = asyncio.get_running_loop()

        def keep_blocking(lines: Sequence[NewLine]) -> None:
            asyncio.run_coroutine_threadsafe(keep(lines), loop).result()

        validator = Validator(check, self._compiler, keep_blocking)
        running = asyncio.create_task(asyncio.to_thread(validator.run))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    async def close(self) -> None:
        pass


class FakeEngine:
    """Keeps what it is told; answers row by row when asked: the prompt backwards."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.sent: list[ToEngine] = []
        self.waiting: dict[str, list[int]] = {}
        self._files: dict[str, TokenFile] = {}
        self._given: dict[str, set[int]] = {}
        self.executed: list[str] = []
        self.row_s = 0.0
        """Device time of each row; if any, it is charged with the row's output."""
        self.auto = False

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, AddBatch):
            given = self._given.setdefault(message.batch_id, set())
            assert not given & set(message.rows), "submitted twice to one engine"
            given |= set(message.rows)
            assert len(message.rows) == len(message.params_index)
            assert max(message.params_index) < len(message.params_table)
            self.waiting.setdefault(message.batch_id, []).extend(message.rows)
            self._files[message.batch_id] = TokenFile(message.path)
            if self.auto:
                asyncio.get_running_loop().call_soon(self.answer, message.batch_id)
        elif isinstance(message, CancelBatch):
            self._given.pop(message.batch_id, None)
            rows = self.waiting.pop(message.batch_id, [])
            self.say([output(message.batch_id, row, [], FinishReason.ABORT) for row in rows])

    def answer(self, batch_id: str, count: int | None = None) -> None:
        """Finishes the next rows of a batch."""
        if batch_id not in self.waiting:
            return
        rows = self.waiting[batch_id]
        now, self.waiting[batch_id] = rows[:count], rows[len(rows[:count]) :]
        self.executed += [str(RowId(batch_id, row)) for row in now]
        prompts = {row: self._files[batch_id].prompt(row) for row in now}
        outputs = [output(batch_id, row, prompts[row][::-1], FinishReason.STOP) for row in now]
        self.say(outputs, self._charged(batch_id, len(now)))

    def _charged(self, batch_id: str, num_rows: int) -> RecentSteps | None:
        if not self.row_s or not num_rows:
            return None
        seconds = self.row_s * num_rows
        charge = DeviceCharge("", "batch", batch_id, seconds, seconds, 7.0 * num_rows, 7 * num_rows, num_rows, 0, 2, 0)
        return RecentSteps(0.0, 16, [], [], 0.0, {"": seconds}, charges=[charge])

    def say(self, outputs: Sequence[RequestOutput], recent: RecentSteps | None = None) -> None:
        if outputs:
            self._client.on_message(StepOutputs(list(outputs), [], recent=recent))

    def added(self, batch_id: str) -> list[list[int]]:
        """Rows of each AddBatch for a batch."""
        return [m.rows for m in self.sent if isinstance(m, AddBatch) and m.batch_id == batch_id]

    def aborted(self) -> list[str]:
        return [i for m in self.sent if isinstance(m, AbortRequest) for i in m.request_ids]


def output(
    batch_id: str, row: int, tokens: Iterable[int], finish: FinishReason | None = None, error: str | None = None
) -> RequestOutput:
    return RequestOutput(str(RowId(batch_id, row)), list(tokens), finish_reason=finish, error=error)


class FakeClock:
    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s

    def clocks(self) -> Clocks:
        return Clocks(wall=lambda: self.now_s, monotonic=lambda: self.now_s - 1_700_000_000.0)


class Server:
    """One life of a server on a data directory."""

    def __init__(
        self,
        data_dir: Path,
        *,
        clock: FakeClock | None = None,
        fingerprint: str = "fake",
        names: tuple[str, ...] = FakeCompiler.names,
        max_model_len: int = NO_LIMIT,
        stores_replies: bool = True,
        engine: bool = True,
        checker: Checker | None = None,
        planner: MakesPlans | None = None,
        ready: EngineReady = READY,
        store_url: str | None = None,
        blobs_url: str | None = None,
        lease_s: float = LEASE_S,
        tick_s: float = 0.02,
    ) -> None:
        self.clock = clock or FakeClock()
        self.client = EngineClient()
        self.engine = FakeEngine(self.client)
        self.compiler = FakeCompiler(fingerprint, names, max_model_len, stores_replies=stores_replies)
        settings = BatchSettings(
            data_dir=data_dir,
            sharing=sharing_of(store_url, blobs_url, lease_s),
            completion_windows=("24h", "1h"),
            tick_s=tick_s,
        )
        checker = checker or ThreadChecker(self.compiler)
        self.service = BatchService(
            settings, self.client, self.compiler, checker, clocks=self.clock.clocks(), planner=planner
        )
        self._ready = ready
        self._with_engine = engine

    async def __aenter__(self) -> "Server":
        await self.service.start()
        if self._with_engine:
            self.client.attach(self.engine, self._ready)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.service.stop()

    def new_engine(self, suspects: Sequence[str] = (), evidence: Evidence = Evidence.STRONG) -> FakeEngine:
        """The engine dies in a step with these rows, and another takes its place."""
        self.client.detach(suspects, evidence)
        self.engine = FakeEngine(self.client)
        self.client.attach(self.engine, self._ready)
        return self.engine

    async def keep_house(self) -> None:
        """What the server does every minute."""
        await Housekeeping(self.service.store, self.service.files, lambda: self.clock.now_s).run()

    async def upload(self, content: bytes, owner: str = "", purpose: str = "batch") -> FileRecord:
        async with self.service.files.upload() as upload:
            await upload.write(content)
            return await self.service.files.commit(upload, UploadForm("input.jsonl", purpose), owner)

    async def create(self, content: bytes | None = None, owner: str = "", **fields: Any) -> BatchRecord:
        if content is not None:
            fields["input_file_id"] = (await self.upload(content, owner)).id
        body = {"endpoint": CHAT, "completion_window": "24h", **fields}
        return await self.service.create_batch(owner, body)

    async def get(self, batch_id: str, owner: str = "") -> BatchRecord:
        return await self.service.get_batch(batch_id, owner)

    async def until(self, batch_id: str, wanted: Callable[[BatchRecord], bool], owner: str = "") -> BatchRecord:
        while not wanted(record := await self.get(batch_id, owner)):  # noqa: ASYNC110 (what it waits for is in a database)
            await asyncio.sleep(0.005)
        return record

    async def until_status(self, batch_id: str, *statuses: str) -> BatchRecord:
        return await self.until(batch_id, lambda record: record.status in statuses)

    async def until_given(self, batch_id: str, messages: int = 1) -> None:
        """The engine has had so many messages of the batch."""
        await until(lambda: len(self.engine.added(batch_id)) >= messages)

    async def until_terminal(self, batch_id: str) -> BatchRecord:
        return await self.until_status(batch_id, *TERMINAL)

    async def until_gone(self, file_id: str) -> None:
        """The bytes of a file have left the disk."""
        await until(lambda: not self.service.files.path(file_id).exists())

    def bytes_of(self, file_id: str | None) -> bytes:
        return b"" if file_id is None else self.service.files.path(file_id).read_bytes()

    def results(self, record: BatchRecord) -> tuple[dict[str, Any], dict[str, Any]]:
        """Output and error lines by custom_id, after checking what holds for every ended batch (B2)."""
        lines = [
            [json.loads(line) for line in self.bytes_of(file_id).decode().splitlines()]
            for file_id in (record.output_file_id, record.error_file_id)
        ]
        output_lines, error_lines = ({line["custom_id"]: line for line in found} for found in lines)
        assert len(output_lines) == len(lines[0])
        assert len(error_lines) == len(lines[1])
        assert not set(output_lines) & set(error_lines)
        assert (record.output_file_id is None) == (not output_lines)
        assert (record.error_file_id is None) == (not error_lines)
        assert record.num_completed == len(output_lines)
        assert record.num_failed == sum(not never_ran(line) for line in error_lines.values())
        assert len(output_lines) + len(error_lines) == record.num_total
        return output_lines, error_lines


def never_ran(line: dict[str, Any]) -> bool:
    """Whether the line of an error file was cancelled or expired. Such lines count neither as completed nor failed."""
    return line["error"] is not None and line["error"]["code"] in ("batch_cancelled", "batch_expired")


def line(custom_id: str, text: str = "", **body: Any) -> dict[str, Any]:
    content = text or f"text of {custom_id}"
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [{"role": "user", "content": content}], **body},
    }


def jsonl(lines: Iterable[dict[str, Any] | str]) -> bytes:
    return "".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines).encode()


def numbered(count: int) -> bytes:
    return jsonl(line(f"c{i}") for i in range(count))
