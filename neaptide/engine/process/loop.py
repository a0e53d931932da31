"""The process around EngineCore: its socket, its loop, its end."""

import gc
import json
import logging
import os
from collections.abc import Sequence
from typing import TextIO

import zmq

from neaptide.engine.clock import Clock
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import MessageSink, MessageSource
from neaptide.engine.messages import (
    EngineReady,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
    from_engine_encoder,
    to_engine_decoder,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
BLOCKED_POLL_S = 0.005
"""Wait for messages after a step in which nobody could run, so that a full pool does not spin."""


class EngineSocket:
    """Both message seams over one ZeroMQ pair socket. Implements ``MessageSource`` and ``MessageSink``."""

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


class RequestLogFile:
    """Append-only JSON lines: which request was first scheduled, and ended, when."""

    ROTATE_BYTES = 64 << 20

    def __init__(self, path: str, clock: Clock) -> None:
        if os.path.exists(path) and os.path.getsize(path) > self.ROTATE_BYTES:
            os.replace(path, f"{path}.1")
        self._file: TextIO = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (lives as long as the engine)
        self._clock = clock
        self._failing = False

    def __call__(self, event: str, request_id: str) -> None:
        line = {"t": round(self._clock.now(), 6), "event": event, "id": request_id, "pid": os.getpid()}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk must not end the engine
            if not self._failing:
                logger.error("the request log cannot be written: %s", error)
            self._failing = True

    def close(self) -> None:
        self._file.close()


def run_engine(core: EngineCore, ready: EngineReady, source: MessageSource, sink: MessageSink, clock: Clock) -> None:
    """Serves until ``Shutdown``. The heartbeat goes out even when nothing happens."""
    sink.send(ready)
    # What start-up has allocated never becomes garbage: keep the collector from walking it in the loop.
    gc.collect()
    gc.freeze()
    last_sent_s = clock.now()
    wait_s = 0.0
    while True:
        for message in source.poll(wait_s):
            if isinstance(message, Shutdown):
                return
            core.handle(message)
        outputs = core.step() if core.has_work else StepOutputs([], [])
        wait_s = 0.0
        if not core.has_work:
            wait_s = HEARTBEAT_S
        elif not outputs.stats:
            wait_s = BLOCKED_POLL_S
        now_s = clock.now()
        if outputs.outputs or outputs.stats or now_s - last_sent_s >= HEARTBEAT_S:
            sink.send(outputs)
            last_sent_s = now_s
