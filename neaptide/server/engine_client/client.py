"""The API process's client of the engine: sends requests and delivers their outputs, across engine restarts.

One ``EngineClient`` outlives many engine processes. The supervisor attaches a link when an engine is ready and detaches
it when that engine ends. All requests in flight are then notified at once.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    CancelBatch,
    EngineFatal,
    EngineReady,
    FromEngine,
    PlanReady,
    RequestOutput,
    SetOffline,
    SetShareWeights,
    StepOutputs,
    TellRoom,
    TellTraffic,
    ToEngine,
)
from neaptide.engine.params import FinishReason
from neaptide.engine.row_id import RowId
from neaptide.server.engine_client.backlog import OutputBacklog, SlowReaderError
from neaptide.server.engine_client.deaths import Evidence
from neaptide.server.engine_client.events import (
    BatchOutlooks,
    BatchOutputs,
    EngineLost,
    Event,
    EventT,
    LineBody,
    RequestFailed,
    RowOutput,
)

logger = logging.getLogger(__name__)


MAX_REPLAYS = 2
REPLAY_WAIT_S = 60.0
"""Time for which a request without output waits for the next engine."""


class EngineUnavailableError(Exception):
    """No engine is attached, or the engine of this request ended.

    ``may_have_caused_it``: the engine died in this request's first step, so a retry may crash the next one.
    """

    def __init__(self, message: str, *, may_have_caused_it: bool = False) -> None:
        super().__init__(message)
        self.may_have_caused_it = may_have_caused_it


class _Lost(NamedTuple):
    """Entry in a request's queue: its engine ended."""

    in_step: bool
    """The request was scheduled in the last step of the engine."""


class EngineLink(Protocol):
    """Connection to one engine process."""

    def send(self, message: ToEngine) -> None:
        """Sends a message. Never waits and never fails.

        A message to an engine that has ended is lost, like the engine's other work. ``detach`` follows and notifies all
        that wait for an answer.
        """
        ...


class Relay(Protocol):
    """Another API process, which has an ``EngineClient`` of its own for its requests."""

    def on_ready(self, info: EngineReady) -> None:
        """An engine is ready."""
        ...

    def on_lost(self, suspects: Sequence[str], evidence: Evidence) -> None:
        """The engine has ended; as for ``EngineClient.detach``."""
        ...

    def give(self, output: RequestOutput) -> None:
        """Takes an output of one of its requests."""
        ...

    def flush(self) -> None:
        """Sends the outputs that it has taken."""
        ...


class EngineClient:
    """Routes messages between HTTP handlers, the batch service and the engine. Event loop only."""

    def __init__(self) -> None:
        self._link: EngineLink | None = None
        self._info: EngineReady | None = None
        self._ready = asyncio.Event()
        self._queues: dict[str, OutputBacklog[_Lost]] = {}
        self._silent: set[str] = set()
        """Requests that have had no output yet."""
        self._relays: list[Relay] = []
        self._relayed: dict[str, Relay] = {}
        """Requests of other API processes."""
        self._listeners: defaultdict[type[Any], list[Callable[[Any], None]]] = defaultdict(list)
        self._offline_paused = False
        self._share_weights: dict[str, float] | None = None
        """Weights that differ from those of the engine's configuration."""
        self.has_given_up = False
        """Whether the supervisor expects no engine any more, though it may keep trying."""
        self.last_end = ""
        """How the last engine ended, for displays; empty before that."""
        self.line_body: Callable[[RowId], LineBody | None] = _no_line
        """The body of a row's line, for an engine that runs lines by their bodies; None if the line has ended.
        Blocking; any thread. Raises OSError if the input file cannot be read now."""

    # ---- what HTTP handlers and the batch service use ----

    @property
    def is_ready(self) -> bool:
        return self._link is not None

    @property
    def info(self) -> EngineReady:
        """The engine's own description. Raises EngineUnavailableError before the first engine was ready."""
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

    async def generate(
        self, request: AddRequest, take_now: Callable[[RequestOutput], bool] | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request; the last has ``finish_reason``. Leaving early aborts it in the engine.

        A request that was waiting when its engine ended is given to the next one. A request that has answered in part,
        or was in the engine's last step, fails.

        Args:
            take_now: see ``OutputBacklog``. It may handle any output after the first and before the last.

        Raises:
            EngineUnavailableError: no engine, or it ended and the request could not be given to the next.
            SlowReaderError: outputs were not read fast enough; the request has been aborted.
        """
        link = self._require_link()
        queue: OutputBacklog[_Lost] = OutputBacklog(take_now)
        self._queues[request.request_id] = queue
        self._silent.add(request.request_id)
        started = finished = False
        replays = 0
        try:
            link.send(request)
            while not finished:
                output = await queue.get()
                if queue.overflowed:
                    raise SlowReaderError
                if isinstance(output, _Lost):
                    finished = True
                    if started or output.in_step or replays == MAX_REPLAYS:
                        raise EngineUnavailableError(
                            "the engine stopped while it worked on this request",
                            may_have_caused_it=output.in_step and not started,
                        )
                    replays += 1
                    (await self._next_link()).send(request)
                    finished = False
                    continue
                started = True
                finished = output.finish_reason is not None
                yield output
        finally:
            self._queues.pop(request.request_id, None)
            self._silent.discard(request.request_id)
            if not finished:
                self.abort([request.request_id])

    async def _next_link(self) -> EngineLink:
        try:
            async with asyncio.timeout(REPLAY_WAIT_S):
                await self._ready.wait()
        except TimeoutError:
            raise EngineUnavailableError("no engine has come back in time") from None
        return self._require_link()

    def abort(self, request_ids: list[str], reason: FinishReason = FinishReason.ABORT) -> None:
        if self._link is not None:
            self._link.send(AbortRequest(request_ids, reason))

    def submit_batch(self, message: AddBatch) -> None:
        self._require_link().send(message)

    def cancel_batch(self, batch_id: str) -> None:
        if self._link is not None:
            self._link.send(CancelBatch(batch_id))

    def follow(self, plan: PlanReady) -> None:
        if self._link is not None:
            self._link.send(plan)

    def set_offline(self, paused: bool) -> None:
        """Pauses or resumes offline work, for this engine and later ones."""
        self._offline_paused = paused
        if self._link is not None:
            self._link.send(SetOffline(paused))

    def set_share_weights(self, weights: dict[str, float]) -> None:
        """Weights of API keys for offline work, for this engine and later ones."""
        self._share_weights = weights
        if self._link is not None:
            self._link.send(SetShareWeights(weights))

    def subscribe(self, event_type: type[EventT], listener: Callable[[EventT], None]) -> None:
        """Calls ``listener`` with every event of this type, in the order of subscriptions. It must not block.

        A subscriber to ``EngineReady`` is called at once if an engine is ready.
        """
        self._listeners[event_type].append(listener)
        if event_type is EngineReady and self._link is not None:
            cast("Callable[[EngineReady], None]", listener)(self.info)

    def ask_traffic(self) -> None:
        """Asks the engine for its traffic, which subscribers to ``Traffic`` get. Raises EngineUnavailableError."""
        self._require_link().send(TellTraffic())

    def ask_room(self, with_cached: bool) -> None:
        """Asks the engine for its capacity, which subscribers to ``Room`` get. Raises EngineUnavailableError."""
        self._require_link().send(TellRoom(with_cached))

    # ---- what relays use ----

    def add_relay(self, relay: Relay) -> None:
        self._relays.append(relay)
        if self._link is not None:
            relay.on_ready(self.info)

    def remove_relay(self, relay: Relay) -> None:
        """Aborts its requests."""
        self._relays.remove(relay)
        if request_ids := [request_id for request_id, its in self._relayed.items() if its is relay]:
            self.abort_relayed(request_ids, FinishReason.ABORT)

    def add_relayed(self, request: AddRequest, relay: Relay) -> None:
        """Sends a request to the engine, unless this engine has it or there is none.

        Its process gives it to the next engine once it has learnt of the end of this one, which may be late.
        """
        if self._link is not None and request.request_id not in self._relayed:
            self._relayed[request.request_id] = relay
            self._silent.add(request.request_id)
            self._link.send(request)

    def abort_relayed(self, request_ids: list[str], reason: FinishReason) -> None:
        if reason is FinishReason.ABORT:  # of a stopped one the last output is awaited
            for request_id in request_ids:
                self._end_relayed(request_id)
        self.abort(request_ids, reason)

    def _end_relayed(self, request_id: str) -> None:
        self._relayed.pop(request_id, None)
        self._silent.discard(request_id)

    # ---- what the supervisor uses ----

    def attach(self, link: EngineLink, info: EngineReady) -> None:
        self._link = link
        self._info = info
        self.has_given_up = False
        if self._offline_paused:
            link.send(SetOffline(True))
        if self._share_weights is not None:
            link.send(SetShareWeights(self._share_weights))
        self._ready.set()
        self._tell(info)
        for relay in self._relays:
            relay.on_ready(info)

    def detach(self, suspects: Sequence[str] = (), evidence: Evidence = Evidence.STRONG) -> None:
        """Notifies every stream and subscriber that the engine ended.

        ``suspects`` are the ids of the requests in its last step. ``evidence`` is what its end says against them.
        """
        if self._link is None:
            return
        self._link = None
        self._ready.clear()
        self._tell(BatchOutlooks(()))
        in_step = frozenset(suspects)
        for request_id, queue in self._queues.items():
            queue.put_nowait(_Lost(request_id in in_step))
        rows = [row for request_id in suspects if (row := RowId.parse(request_id)) is not None]
        # A request without output is a likelier cause than rows that have run for a while.
        excuse = in_step & self._silent
        self._tell(EngineLost(rows, Evidence.EXCUSED if excuse else evidence))
        for request_id in list(self._relayed):
            self._end_relayed(request_id)
        for relay in self._relays:
            relay.on_lost(suspects, evidence)

    def on_message(self, message: FromEngine, *, is_last: bool = True) -> None:
        """Passes a message on.

        Args:
            is_last: whether no further message waits.
        """
        if isinstance(message, StepOutputs):
            self._on_outputs(message, is_last)
        elif isinstance(message, EngineFatal):
            logger.error("engine: %s", message.message)

    def on_rows(self, outputs: Sequence[RowOutput]) -> None:
        """Passes outputs of batch rows on, from an engine in this process."""
        self._tell(BatchOutputs(outputs))

    def _on_outputs(self, message: StepOutputs, is_last: bool) -> None:
        batch_outputs: list[RequestOutput] = []
        queues, silent, relayed = self._queues, self._silent, self._relayed
        for output in message.outputs:
            if output.error is not None:
                self._tell(RequestFailed(output.error))
            queue = queues.get(output.request_id)
            if queue is not None:
                silent.discard(output.request_id)
                queue.give(output, is_last=is_last)
                if queue.overflowed and output.finish_reason is None:
                    self.abort([output.request_id])
            elif (relay := relayed.get(output.request_id)) is not None:
                relay.give(output)
                silent.discard(output.request_id)
                if output.finish_reason is not None:
                    self._end_relayed(output.request_id)
            elif RowId.parse(output.request_id) is not None:
                batch_outputs.append(output)
        for other in self._relays:
            other.flush()
        if batch_outputs:
            self._tell(BatchOutputs(batch_outputs))
        for stats in message.stats:
            self._tell(stats)
        if message.occupancy is not None:
            self._tell(message.occupancy)
        if message.outlooks is not None:
            self._tell(BatchOutlooks(message.outlooks))
        if message.recent is not None:
            self._tell(message.recent)
        for traffic in message.traffic or ():
            self._tell(traffic)
        if message.room is not None:
            self._tell(message.room)

    def _tell(self, event: Event) -> None:
        for listener in self._listeners[type(event)]:
            listener(event)

    def _require_link(self) -> EngineLink:
        if self._link is None:
            raise EngineUnavailableError("the engine is starting or restarting; try again in a few seconds")
        return self._link


def _no_line(_: RowId) -> None:
    """Without batches there are no lines."""
