"""The steps of the last 15 minutes with what each held, in bounded memory; the oldest are dropped first."""

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from neaptide.engine.messages import EngineReady, RecentSteps
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.events import EngineLost
from neaptide.server.why.parts import StepsAround

KEPT_S = 900.0
MAX_BYTES = 32 << 20
CHUNK_STEPS = 128
"""Steps that are compressed together. One chunk takes less than a millisecond."""
BACK_S = 10.0
"""How far before a wait steps are looked at: online work that waits longer is not followed back."""
MAX_ADMISSIONS = 1 << 16
"""Most requests whose admission numbers are kept, of those that have not ended."""
MAX_ENDED = 1 << 10
"""Number of last ended requests that are known as such: a step that admitted one may be reported after its end."""

ROUNDING_S = 1e-6

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[RecentSteps])


class _Chunk(NamedTuple):
    first_s: float
    last_s: float
    data: bytes


class _EngineRecord(NamedTuple):
    """Recorded steps of one engine."""

    ready_s: float
    chunks: deque[_Chunk]


class StepRing:
    """Records the steps of an engine client. Event loop only, but for ``StepsCut.read``.

    Args:
        clock: ``CLOCK_MONOTONIC``.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._engines: deque[_EngineRecord] = deque()
        self._open: list[RecentSteps] = []
        """Reports of the last engine that are not compressed yet."""
        self.num_bytes = 0
        self.last_s = -math.inf
        """End of the last recorded step."""
        self.since_s = -math.inf
        """End of the last step that was dropped."""
        self._gone: deque[tuple[float, float]] = deque()
        """Times without an engine; the last may be open."""
        self._admissions: dict[str, list[int]] = {}
        self._ended: dict[str, None] = {}
        client.subscribe(EngineReady, self._on_ready)
        client.subscribe(EngineLost, self._on_lost)
        client.subscribe(RecentSteps, self._on_steps)

    # ---- events ----

    def _on_ready(self, _: EngineReady) -> None:
        self._close_chunk()
        now_s = self._clock()
        if self._gone and self._gone[-1][1] == math.inf:
            self._gone.append((self._gone.pop()[0], now_s))
        self._engines.append(_EngineRecord(now_s, deque()))
        self._forget()

    def _on_lost(self, _: EngineLost) -> None:
        self._admissions.clear()
        if not self._gone or self._gone[-1][1] < math.inf:
            self._gone.append((self._clock(), math.inf))

    def _on_steps(self, report: RecentSteps) -> None:
        if not self._engines:
            return
        for step in report.steps:
            for number, request_id in step.admitted:
                if request_id not in self._ended:
                    self._admissions.setdefault(request_id, []).append(number)
        while len(self._admissions) > MAX_ADMISSIONS:
            del self._admissions[next(iter(self._admissions))]
        if report.steps:
            self.last_s = report.steps[-1].end_s
        self._open.append(report)
        if sum(len(one.steps) for one in self._open) >= CHUNK_STEPS:
            self._close_chunk()
            self._forget()

    def _close_chunk(self) -> None:
        reports, self._open = self._open, []
        if reports and self._engines:
            chunk = _Chunk(_first_s(reports), reports[-1].now_s, zlib.compress(_encoder.encode(reports), 1))
            self._engines[-1].chunks.append(chunk)
            self.num_bytes += len(chunk.data)

    def _forget(self) -> None:
        oldest_s = self._clock() - KEPT_S
        while self._engines:
            chunks = self._engines[0].chunks
            while chunks and (chunks[0].last_s < oldest_s or self.num_bytes > self._max_bytes):
                dropped = chunks.popleft()
                self.since_s = dropped.last_s
                self.num_bytes -= len(dropped.data)
            if chunks or len(self._engines) == 1:
                break
            self._engines.popleft()
        while self._gone and self._gone[0][1] < oldest_s:
            self._gone.popleft()

    # ---- questions ----

    def take_admissions(self, request_id: str) -> tuple[int, ...]:
        """The admission numbers of a request that has ended; they are forgotten here."""
        self._ended[request_id] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        return tuple(self._admissions.pop(request_id, ()))

    def gone(self, start_s: float, end_s: float) -> tuple[tuple[float, float], ...]:
        """Times without an engine between the two."""
        return tuple((max(a, start_s), min(b, end_s)) for a, b in self._gone if a < end_s and b > start_s)

    def cut(self, start_s: float, end_s: float) -> "StepsCut":
        """The record of the engine that ran at ``end_s``, from a little before ``start_s``."""
        engine = next((one for one in reversed(self._engines) if one.ready_s <= end_s), None)
        if engine is None:
            return StepsCut([], [], math.inf)
        first_s, since_s = start_s - BACK_S, max(self.since_s, engine.ready_s)
        chunks = [one.data for one in engine.chunks if one.last_s >= first_s and one.first_s <= end_s]
        return StepsCut(chunks, list(self._open) if engine is self._engines[-1] else [], since_s)


class StepsCut(NamedTuple):
    """A part of the record, still compressed."""

    chunks: list[bytes]
    reports: list[RecentSteps]
    since_s: float

    def read(self, request_id: str, admissions: Iterable[int], before_s: float, until_s: float) -> StepsAround:
        """The steps that ended between the two times, for a request with these admission numbers. Any thread."""
        reports = [one for data in self.chunks for one in _decoder.decode(zlib.decompress(data))] + self.reports
        steps = [
            one for report in reports for one in report.steps if before_s - BACK_S <= one.end_s <= until_s + ROUNDING_S
        ]
        ids = {number: name for report in reports for one in report.steps for number, name in one.admitted}
        ids |= dict.fromkeys(admissions, request_id)
        taken_s = {name: seconds for report in reports for name, seconds, _ in report.taken}
        block_size = reports[0].block_size if reports else 1
        return StepsAround(steps, taken_s, ids, block_size, self.since_s)


def _first_s(reports: list[RecentSteps]) -> float:
    steps = reports[0].steps
    return steps[0].start_s if steps else reports[0].now_s
