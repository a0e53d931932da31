"""Which request was first scheduled, and ended, when: what was executed, and how often."""

import json
import logging
import os
from typing import TextIO

from neaptide.engine.clock import Clock
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.step import Step

logger = logging.getLogger(__name__)


class RequestLog(EngineObserver):
    """Append-only JSON lines: which request was first scheduled, and ended, when."""

    ROTATE_BYTES = 64 << 20

    def __init__(self, path: str, clock: Clock) -> None:
        if os.path.exists(path) and os.path.getsize(path) > self.ROTATE_BYTES:
            os.replace(path, f"{path}.1")
        self._file: TextIO = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (lives as long as the engine)
        self._clock = clock
        self._failing = False

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        for new in step.plan.new_requests:
            self._write("start", new.request_id)

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._write("end", request.request_id)

    def refused(self, request_id: str) -> None:
        self._write("end", request_id)

    def _write(self, event: str, request_id: str) -> None:
        line = {"t": round(self._clock.now(), 6), "event": event, "id": request_id, "pid": os.getpid()}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk must not end the engine
            if not self._failing:
                logger.error("the request log cannot be written: %s", error)
            self._failing = True

    def close(self) -> None:
        self._file.close()
