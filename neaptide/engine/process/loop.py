"""The engine process: its socket, its loop, its end."""

import gc
import math
from collections.abc import Sequence

import zmq

from neaptide.engine.clock import Clock
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import MessageSink, MessageSource
from neaptide.engine.messages import (
    EngineReady,
    FromEngine,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepStats,
    ToEngine,
    from_engine_encoder,
    to_engine_decoder,
)
from neaptide.engine.process.arrivals import OnlineArrivals
from neaptide.engine.process.room import RoomTeller
from neaptide.engine.record.step_reporter import StepReporter
from neaptide.engine.record.traffic_recorder import TrafficRecorder
from neaptide.engine.steps.stats import occupancy

HEARTBEAT_S = 0.5
BLOCKED_POLL_S = 0.005
"""Wait for messages after a step in which no request could run. Prevents spinning when the pool is full."""
MIN_WAIT_S = 0.001
"""Shortest wait that is worth a poll, which counts milliseconds."""
ARRIVAL_S = 0.002
"""Longest wait for an online request that has been sent, so that the next step includes it."""


class EngineSocket:
    """Receives and sends messages over one ZeroMQ pair socket. Implements ``MessageSource`` and ``MessageSink``."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        messages: list[ToEngine] = []
        if self._socket.poll(int(timeout_s * 1000)):
            while True:
                try:
                    messages.append(to_engine_decoder.decode(self._socket.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
        return messages

    def send(self, message: FromEngine) -> None:
        self._socket.send(from_engine_encoder.encode(message))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _Publisher:
    """Sends new tokens before the engine has recorded their step.

    Where cores are few, the API process handles the tokens while the engine's core would be idle. Statistics of the
    step are sent with the next tokens, because every message wakes the other process.
    """

    def __init__(self, sink: MessageSink) -> None:
        self._sink = sink
        self._stats: list[StepStats] = []
        self._has_sent = False
        """Whether tokens of this step have been sent."""

    def send(self, outputs: list[RequestOutput]) -> None:
        stats, self._stats = self._stats, []
        self._has_sent = True
        self._sink.send(StepOutputs(outputs, stats))

    def rest(self, step: StepOutputs, *, goes_on: bool) -> StepOutputs:
        """The rest of the step's report. Statistics wait if tokens were sent already and others will follow."""
        stats = self._stats + step.stats
        waits = self._has_sent and goes_on and not step.outputs
        self._has_sent, self._stats = False, stats if waits else []
        return StepOutputs(step.outputs, [] if waits else stats)


def run_engine(
    core: EngineCore,
    ready: EngineReady,
    source: MessageSource,
    sink: MessageSink,
    clock: Clock,
    traffic: TrafficRecorder | None = None,
    arrivals: OnlineArrivals | None = None,
) -> None:
    """Serves until ``Shutdown``. Sends the heartbeat even when nothing happens.

    Args:
        traffic: records what is served.
        arrivals: counters of sent online requests, for which the executor may abort steps.
    """
    room, recent = RoomTeller(core.scheduler), StepReporter(core.scheduler)
    core.subscribe(room)
    core.subscribe(recent)
    publisher = _Publisher(sink)
    sink.send(ready)
    # Objects made at start-up never become garbage: keep the collector from walking them in the loop.
    gc.collect()
    gc.freeze()
    last_sent_s = -math.inf  # The first report is due at once: it has the occupancy before any request.
    wait_s = 0.0
    while True:
        messages = source.poll(wait_s)
        if arrivals is not None and not messages and arrivals.are_on_their_way:
            messages = source.poll(ARRIVAL_S)
        for message in messages:
            if isinstance(message, Shutdown):
                return
            core.handle(message)
            if arrivals is not None:
                arrivals.note_taken(message)
        core.read_again()
        wait_s = min(core.plan_at_s - clock.now(), HEARTBEAT_S)
        if wait_s > MIN_WAIT_S:
            continue  # Planned late, so that an arrival until then waits for one step, not two.
        step = core.step(publisher.send) if core.has_work else StepOutputs([], [])
        wait_s = 0.0
        if not core.has_work:
            wait_s = HEARTBEAT_S
        elif not step.stats and not core.has_step_in_flight:
            wait_s = BLOCKED_POLL_S
        outputs = publisher.rest(step, goes_on=core.has_work)
        outputs.outlooks = core.report_outlooks()
        now_s = clock.now()
        if traffic is not None:
            outputs.traffic = traffic.take(now_s) or None
        outputs.room = room.take(now_s, step.stats)
        told = (outputs.outlooks, outputs.traffic, outputs.room)
        has_news = outputs.outputs or outputs.stats or any(news is not None for news in told)
        if has_news or now_s - last_sent_s >= HEARTBEAT_S:
            if not step.stats:
                outputs.occupancy = occupancy(core.scheduler, now_s)
            outputs.recent = recent.take(now_s)
            sink.send(outputs)
            last_sent_s = now_s
