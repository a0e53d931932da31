"""The API process's view of the engine: requests in, their outputs out, across engine restarts.

One ``EngineClient`` outlives many engine processes. The supervisor attaches a link when an engine is
ready and detaches it when that engine is gone; everything in flight is told at once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    CancelBatch,
    EngineFatal,
    EngineReady,
    FromEngine,
    RequestOutput,
    SetOffline,
    StepOutputs,
    StepStats,
    ToEngine,
)
from neaptide.engine.params import FinishReason

logger = logging.getLogger(__name__)


class EngineUnavailableError(Exception):
    """No engine is attached, or the one that held this request is gone."""


class EngineLink(Protocol):
    """The way to one engine process."""

    def send(self, message: ToEngine) -> None: ...


class BatchListener(Protocol):
    """Who wants to hear of batch rows. Called on the event loop; must not block."""

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Outputs with ``request_id`` = ``"{batch_id}:{row}"``."""
        ...

    def on_engine_ready(self) -> None:
        """A new engine knows no jobs: submit every unfinished one."""
        ...

    def on_engine_lost(self) -> None: ...


class StatsListener(Protocol):
    def on_stats(self, stats: StepStats) -> None: ...


class EngineClient:
    """Routes messages between HTTP handlers, the batch service and the engine. Event loop only."""

    def __init__(self) -> None:
        self._link: EngineLink | None = None
        self._info: EngineReady | None = None
        self._ready = asyncio.Event()
        self._queues: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._batch_listener: BatchListener | None = None
        self._stats_listeners: list[StatsListener] = []
        self._offline_paused = False
        self.last_heartbeat_s: float | None = None
        """Event-loop time of the last message from the engine."""

    # ---- what HTTP handlers and the batch service use ----

    @property
    def is_ready(self) -> bool:
        return self._link is not None

    @property
    def info(self) -> EngineReady:
        """What the engine said of itself. Raises EngineUnavailableError before the first engine was ready."""
        if self._info is None:
            raise EngineUnavailableError("the engine has not started yet")
        return self._info

    @property
    def offline_paused(self) -> bool:
        return self._offline_paused

    @property
    def num_in_flight(self) -> int:
        return len(self._queues)

    async def wait_ready(self) -> EngineReady:
        await self._ready.wait()
        return self.info

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request; the last has ``finish_reason``. Leaving early aborts it in the engine.

        Raises:
            EngineUnavailableError: no engine, or it went away before the request ended.
        """
        link = self._require_link()
        queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._queues[request.request_id] = queue
        finished = False
        try:
            link.send(request)
            while not finished:
                output = await queue.get()
                if output is None:
                    finished = True
                    raise EngineUnavailableError("the engine stopped while it worked on this request")
                finished = output.finish_reason is not None
                yield output
        finally:
            self._queues.pop(request.request_id, None)
            if not finished:
                self.abort([request.request_id])

    def abort(self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT) -> None:
        if self._link is not None:
            self._link.send(AbortRequest(request_ids, reason))

    def submit_batch(self, message: AddBatch) -> None:
        self._require_link().send(message)

    def cancel_batch(self, batch_id: str) -> None:
        if self._link is not None:
            self._link.send(CancelBatch(batch_id))

    def set_offline(self, paused: bool) -> None:
        """Holds for this engine and for those that follow it."""
        self._offline_paused = paused
        if self._link is not None:
            self._link.send(SetOffline(paused))

    def set_batch_listener(self, listener: BatchListener) -> None:
        self._batch_listener = listener
        if self._link is not None:
            listener.on_engine_ready()

    def add_stats_listener(self, listener: StatsListener) -> None:
        self._stats_listeners.append(listener)

    # ---- what the supervisor uses ----

    def attach(self, link: EngineLink, info: EngineReady) -> None:
        self._link = link
        self._info = info
        if self._offline_paused:
            link.send(SetOffline(True))
        self._ready.set()
        if self._batch_listener is not None:
            self._batch_listener.on_engine_ready()

    def detach(self) -> None:
        """The engine is gone: ends every stream, tells the batch service."""
        if self._link is None:
            return
        self._link = None
        self._ready.clear()
        for queue in self._queues.values():
            queue.put_nowait(None)
        if self._batch_listener is not None:
            self._batch_listener.on_engine_lost()

    def on_message(self, message: FromEngine) -> None:
        self.last_heartbeat_s = asyncio.get_running_loop().time()
        if isinstance(message, StepOutputs):
            self._on_outputs(message)
        elif isinstance(message, EngineFatal):
            logger.error("engine: %s", message.message)

    def _on_outputs(self, message: StepOutputs) -> None:
        batch_outputs: list[RequestOutput] = []
        for output in message.outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)
            elif ":" in output.request_id:
                batch_outputs.append(output)
        if batch_outputs and self._batch_listener is not None:
            self._batch_listener.on_outputs(batch_outputs)
        for stats in message.stats:
            for listener in self._stats_listeners:
                listener.on_stats(stats)

    def _require_link(self) -> EngineLink:
        if self._link is None:
            raise EngineUnavailableError("the engine is starting or restarting; try again in a few seconds")
        return self._link
