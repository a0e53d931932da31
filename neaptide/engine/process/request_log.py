"""Log of when each request was first scheduled and when it ended."""

import json
import logging
import os
from typing import TextIO

from neaptide.engine.clock import Clock
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.private_files import private_opener
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step

logger = logging.getLogger(__name__)


class RequestLog(EngineObserver):
    """Append-only JSON lines: when each request was first scheduled and when it ended.

    A full file becomes ``PATH.1``, that ``PATH.2``, and so on; ``num_old`` of those are kept.
    """

    def __init__(self, path: str, clock: Clock, max_bytes: int, num_old: int) -> None:
        self._path = path
        self._clock = clock
        self._max_bytes = max_bytes
        self._num_old = num_old
        self._failing = False
        self._started_in_vain: set[str] = set()
        """Requests whose start is logged and whose step was undone or aborted. The executor gets them as new once
        more."""
        self._file = self._open()
        self._num_bytes = os.path.getsize(path)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        for new in step.plan.new_requests:
            if new.request_id in self._started_in_vain:
                self._started_in_vain.remove(new.request_id)
            else:
                self._write("start", new.request_id)

    def undone(self, step: Step) -> None:
        self._started_in_vain.update(new.request_id for new in step.plan.new_requests)

    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        self.undone(step)

    def ended(self, request: Request, reason: FinishReason) -> None:
        self._started_in_vain.discard(request.request_id)
        self._write("end", request.request_id)

    def refused(self, request_id: str) -> None:
        self._write("end", request_id)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: str, request_id: str) -> None:
        line = {"t": round(self._clock.now(), 6), "event": event, "id": request_id, "pid": os.getpid()}
        text = json.dumps(line) + "\n"
        try:
            if self._num_bytes and self._num_bytes + len(text) > self._max_bytes:
                self._rotate()
            self._file.write(text)
            self._num_bytes += len(text)
        except OSError as error:  # A full disk must not end the engine.
            if not self._failing:
                logger.error("the request log cannot be written: %s", error)
            self._failing = True

    def _open(self) -> TextIO:
        return open(self._path, "a", encoding="utf-8", buffering=1, opener=private_opener)

    def _rotate(self) -> None:
        """Keeps the full file open until its successor is open: if the disk refuses that, no line is lost."""
        names = [self._path, *(f"{self._path}.{number}" for number in range(1, self._num_old + 1))]
        for older, newer in zip(names[:0:-1], names[-2::-1], strict=True):
            if os.path.exists(newer):
                os.replace(newer, older)
        if self._num_old == 0:
            os.unlink(self._path)
        full, self._file = self._file, self._open()
        full.close()
        self._num_bytes = 0
