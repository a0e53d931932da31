"""vLLM as the engine of the batch service."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus

import msgspec

from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    CancelBatch,
    RequestOutput,
    SetOffline,
    StepOutputs,
    ToEngine,
)
from neaptide.engine.params import FinishReason
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.events import LineReply
from neaptide_vllm.batches.line_app import HttpReply, LineApp
from neaptide_vllm.batches.line_pool import LinePool
from neaptide_vllm.batches.middleware import BATCH_PRIORITY, PRIORITY_HEADER

logger = logging.getLogger(__name__)

TICK_S = 1.0
RETRY_S = 1.0
MAX_FAILURES = 3
"""Replies of vLLM about a fault of its own that end a line: one may come of an engine that is about to end."""
PASSING = frozenset({408, 429, 499, 503})
"""Statuses of vLLM that say nothing of the line: it runs again."""


_FAILED = HttpReply(500, b'{"error":{"message":"Internal server error.","type":"server_error"}}')


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] = []
    status: str | None = None


_answers = msgspec.json.Decoder(_Answer)


class VllmLink:
    """Opens lines in the pool's order and sends each to vLLM's application. Implements ``EngineLink``. Event loop only.

    Args:
        is_ending: whether vLLM's engine has ended or is about to. Nothing that comes then counts: the next server runs
            those lines.
    """

    def __init__(
        self,
        app: LineApp,
        client: EngineClient,
        pool: LinePool,
        is_ending: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._client, self._pool = app, client, pool
        self._is_ending, self._clock = is_ending, clock
        self._drops: dict[str, asyncio.Event] = {}
        """Set when an open line is dropped, by request id."""
        self._runs: set[asyncio.Task[None]] = set()
        self._unread: list[AddBatch] = []
        """Messages whose token files cannot be read now."""
        self._is_paused = self._is_closed = False
        self._ticking = asyncio.create_task(self._tick(), name="batch lines")

    def send(self, message: ToEngine) -> None:
        """As in ``EngineLink``."""
        match message:
            case AddBatch():
                self._add(message)
            case CancelBatch(batch_id):
                self._unread = [one for one in self._unread if one.batch_id != batch_id]
                self._drop(self._pool.cancel(batch_id))
            case AbortRequest(request_ids):
                self._drop(self._pool.drop(request_ids))
            case SetOffline(paused):
                self._is_paused = paused
        self._fill()

    @property
    def open_lines(self) -> list[str]:
        """Ids of the lines that vLLM has."""
        return list(self._drops)

    @property
    def _stops(self) -> bool:
        return self._is_closed or self._is_ending()

    async def close(self) -> None:
        """Opens nothing more and drops what is open; the next server runs it."""
        self._is_closed = True
        self._ticking.cancel()
        for is_dropped in self._drops.values():
            is_dropped.set()
        await asyncio.gather(self._ticking, *self._runs, return_exceptions=True)

    def _add(self, message: AddBatch) -> None:
        try:
            self._pool.add(message)
        except (OSError, ValueError) as error:
            logger.warning("batch %s: its lines wait: %s", message.batch_id, error)
            self._unread.append(message)

    async def _tick(self) -> None:
        while True:
            unread, self._unread = self._unread, []
            for message in unread:
                self._add(message)
            self._fill()
            if (outlooks := self._pool.report()) is not None:
                self._client.on_message(StepOutputs([], [], outlooks=outlooks))
            await asyncio.sleep(TICK_S)

    def _fill(self) -> None:
        self._pool.begin(self._clock(), self._is_paused)
        while not self._stops and (request := self._pool.open_next()) is not None:
            is_dropped = self._drops[request.request_id] = asyncio.Event()
            run = asyncio.create_task(self._run(request, is_dropped))
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)

    def _drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._drops.pop(request_id).set()
            self._client.on_rows([RequestOutput(request_id, [], finish_reason=FinishReason.ABORT)])

    async def _run(self, request: Request, is_dropped: asyncio.Event) -> None:
        """Runs one line until it ends, is dropped, or the server stops."""
        reply, num_failures = None, 0
        while reply is None:
            reply = await self._reply(request, is_dropped)
            if reply is not None and reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                num_failures += 1
                reply = reply if num_failures == MAX_FAILURES else None
            if reply is None:
                await asyncio.sleep(RETRY_S)
            if self._stops or is_dropped.is_set():
                return
        del self._drops[request.request_id]
        self._pool.end(request, _num_answer_tokens(reply.body))
        self._client.on_rows([LineReply(request.request_id, reply.status, reply.body.decode())])
        self._fill()

    async def _reply(self, request: Request, is_dropped: asyncio.Event) -> HttpReply | None:
        """vLLM's reply; None if the line has to run again."""
        row = RowId.parse(request.request_id)
        assert row is not None
        try:
            line = await asyncio.to_thread(self._client.line_body, row)
        except OSError as error:
            logger.warning("batch %s: a line waits: %s", row.batch_id, error)
            return None
        if line is None:  # It has ended otherwise, and its reply will be ignored.
            return _FAILED
        headers = {
            "content-type": "application/json",
            "x-request-id": f"{row.batch_id}-{row.row}",
            PRIORITY_HEADER: str(BATCH_PRIORITY),
        }
        try:
            reply = await self._app.post(line.endpoint, msgspec.json.encode(line.body), headers, is_dropped)
        except Exception:
            if not (self._stops or is_dropped.is_set()):
                logger.exception("batch %s line %d: vLLM failed", row.batch_id, row.row)
            return _FAILED
        return None if reply.status in PASSING or _is_aborted(reply) else reply


def _is_aborted(reply: HttpReply) -> bool:
    """Whether vLLM aborted the request, which it reports as a reply like any other: it stops, or was paused."""
    answer = _decoded(reply.body)
    return reply.status == 200 and any(choice.finish_reason == "abort" for choice in answer.choices)


def _num_answer_tokens(body: bytes) -> int:
    usage = _decoded(body).usage
    return 0 if usage is None else max(usage.completion_tokens, usage.output_tokens)


def _decoded(body: bytes) -> _Answer:
    try:
        return _answers.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Answer()
