"""Quotes of a running server: records the traffic, measures batch files, and answers when a batch would end."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from neaptide.durations import window_seconds
from neaptide.engine.messages import EngineReady, StepStats
from neaptide.server.batches.checking.validate import ENDPOINTS
from neaptide.server.batches.lines import CompiledLine
from neaptide.server.batches.service import BatchService, Promise
from neaptide.server.batches.storing import batch_rows, period_rows
from neaptide.server.batches.storing.models import BatchStatus, FileRecord
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.auth import Principal, share_of
from neaptide.server.http.body_threads import BodyThreads
from neaptide.server.http.errors import (
    ApiError,
    ConflictError,
    InvalidRequestError,
    UnavailableError,
    engine_unavailable,
)
from neaptide.server.http.fair_queue import FairQueue
from neaptide.server.http.jsonbody import parse_object
from neaptide.server.observe.request_log import RequestRecord, RequestTerms
from neaptide.server.observe.timing import RequestTiming
from neaptide.server.quotes.fluid import PoolBatch
from neaptide.server.quotes.measure import FileSize, MeasureTask, size_decoder, task_encoder
from neaptide.server.quotes.periods import Period, PeriodRecorder, period_decoder
from neaptide.server.quotes.quote import Quote, QuoteInputs, arithmetic, quote
from neaptide.server.quotes.work import FEWEST_BATCHES, BatchSize, DeviceTime, KnownBatch
from neaptide.server.subprocesses.on_call import Child, ChildDiedError

logger = logging.getLogger(__name__)

WINDOWS = ("1h", "6h", "24h")
TICK_S = 1.0
MEASURE_MODULE = "neaptide.server.quotes.measure"
MEASURE_IDLE_S = 60.0
MEASURE_TIMEOUT_S = 300.0
TURN_WAIT_S = 30.0
NUM_SAMPLES = 128
"""Most lines of a file that are tokenized."""
SAMPLE_BYTES = 256 << 10
"""Most bytes of these lines. Tokenizing takes up to a second per megabyte."""
ALONE = ""
"""Name in the record of a server that has its database to itself."""


@dataclass(frozen=True, slots=True)
class MadeQuote:
    """A quote with what it was made for."""

    at_s: float
    """Unix time."""
    found: Quote
    num_unchecked: int
    """Batches whose files are still being checked, so that their work is not counted."""


class QuoteDesk:
    """Makes quotes, and records the traffic for them. Event loop only.

    Args:
        device_time: the cost model of an engine; None if the engine has told none.
        weights: weights of keys, by share.
    """

    def __init__(
        self,
        service: BatchService,
        client: EngineClient,
        bodies: BodyThreads,
        device_time: Callable[[EngineReady], DeviceTime | None],
        wall: Callable[[], float],
        weights: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._service = service
        self._client = client
        self._bodies = bodies
        self._device_time = device_time
        self._wall = wall
        self._weights = weights
        self.recorder = PeriodRecorder()
        self._child = Child(MEASURE_MODULE, None, MEASURE_IDLE_S)
        self._turns = FairQueue()
        self._ticking: asyncio.Task[None] | None = None
        client.subscribe(StepStats, self.recorder.on_step)

    # ---- the record ----

    def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick(), name="traffic record")

    async def stop(self) -> None:
        """Stores the unfinished period."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
            self._ticking = None
        await self._child.close()
        with contextlib.suppress(StoreUnavailableError):
            await self._keep(self.recorder.take())

    def tick(self) -> Period | None:
        """Notes that time has passed; returns a period that has ended."""
        if self._client.is_ready:
            self.recorder.block_size = self._client.info.block_size
        return self.recorder.tick(self._wall(), is_up=self._client.is_ready, is_paused=self._client.offline_paused)

    async def _tick(self) -> None:
        unkept: list[Period] = []
        while True:
            if (ended := self.tick()) is not None:
                unkept.append(ended)
            try:
                while unkept:
                    await self._keep(unkept[0])
                    unkept.pop(0)
            except StoreUnavailableError as error:
                logger.warning("ten minutes of the traffic record cannot be stored now: %s", error)
            await asyncio.sleep(TICK_S)

    async def _keep(self, period: Period | None) -> None:
        if period is not None and period.seconds > 0.0:
            await self._service.store.write_beside(period_rows.add_period, ALONE, period)

    def on_finished(self, record: RequestRecord, prepared: RequestTerms, timing: RequestTiming) -> None:
        """Notes the end of a request that is no batch line."""
        self.recorder.on_request(record.tier, record.key, record.prompt_tokens, record.completion_tokens)

    # ---- sizes ----

    async def size_of_file(self, file_id: str, principal: Principal) -> BatchSize:
        """Size of an uploaded batch file, estimated from all bytes and some tokenized lines.

        Raises:
            NotFoundError: the caller has no such file.
            InvalidRequestError: it is no batch file.
            UnavailableError: it cannot be measured now.
        """
        files = self._service.files
        record = await files.get(file_id, principal.tenant)
        if record.purpose != "batch":
            raise InvalidRequestError(
                "The input file was not uploaded with purpose 'batch'.", param="input_file_id", code="invalid_value"
            )
        measured = await self._measured(record, principal.share)
        if measured.fault:
            raise InvalidRequestError(measured.fault, param="input_file_id", code="invalid_value")
        num_bytes = sum(map(len, measured.samples))
        lines = await self._bodies.run(partial(self._compile_all, measured.samples), num_bytes, principal.share)
        known = [(line, size) for line, size in zip(lines, measured.sample_bytes, strict=True) if line is not None]
        if not known:
            raise InvalidRequestError(
                "None of the sampled lines would be accepted by its endpoint.",
                param="input_file_id",
                code="invalid_value",
            )
        return extrapolated(measured, [line for line, _ in known], sum(size for _, size in known))

    async def _measured(self, record: FileRecord, share: str) -> FileSize:
        files = self._service.files
        (await files.open(record)).close()  # It is here then, with its name.
        limits = self._service.settings.limits
        task = MeasureTask(str(files.path(record.id)), limits.max_lines, NUM_SAMPLES, SAMPLE_BYTES)
        async with self._turns.turn(share, TURN_WAIT_S):
            try:
                await self._child.wake()
                self._child.send(task_encoder.encode(task))
                found = size_decoder.decode(await self._child.receive(MEASURE_TIMEOUT_S))
            except (ChildDiedError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                logger.warning("a batch file could not be measured: %s", error or type(error).__name__)
                await self._child.close()
                raise UnavailableError("The file could not be measured now; try again.") from None
            except BaseException:
                await self._child.close()  # Its answer would be taken for that of the next task.
                raise
            self._child.rest()
            return found

    def _compile_all(self, samples: Sequence[bytes]) -> list[CompiledLine | None]:
        """In a thread: the lines as the engine would get them; None for one that its endpoint would refuse."""
        return [self._compiled(sample) for sample in samples]

    def _compiled(self, sample: bytes) -> CompiledLine | None:
        try:
            line = parse_object(sample)
            endpoint, body = line.get("url"), line.get("body")
            if endpoint not in ENDPOINTS or not isinstance(body, dict):
                return None
            return self._service.compiler.compile(str(endpoint), body)
        except ApiError as error:
            if error.is_passing:
                raise
            return None

    # ---- quotes ----

    async def quote(
        self,
        size: BatchSize,
        principal: Principal,
        windows_s: tuple[float, ...] = (),
        answer_tokens: float | None = None,
    ) -> MadeQuote:
        """The quote of a batch that would be created now.

        Args:
            windows_s: completion windows; empty for those of ``WINDOWS``.
            answer_tokens: expected answer length, where the caller knows it.

        Raises:
            ConflictError: servers share the batches, so that one cannot foresee them.
            UnavailableError: no engine has told its costs yet.
        """
        if self._service.store.blobs is not None:
            raise ConflictError(
                "Quotes are for a server that shares its batches with no other.", code="quotes_unavailable"
            )
        if not self._client.is_ready or (device := self._device_time(self._client.info)) is None:
            raise engine_unavailable()
        store, now_s = self._service.store, self._wall()
        encoded = await store.read(period_rows.stored_periods, ALONE)
        known = await self._known(principal.tenant)
        live = await store.read(batch_rows.live_batches)
        pool = self._pool({one.id: share_of(one.owner) for one in live})
        question = QuoteInputs(
            now_s=now_s,
            periods=(),
            info=self._client.info,
            device=device,
            pool=pool,
            key=principal.share,
            known=known,
            weights=dict(self._weights()),
            answer_tokens=answer_tokens,
        )
        windows_s = windows_s or tuple(float(window_seconds(window)) for window in WINDOWS)
        current = None if self.recorder.current is None else msgspec.json.encode(self.recorder.current)
        found = await asyncio.to_thread(_quoted, size, question, encoded, current, windows_s)
        num_unchecked = sum(one.status is BatchStatus.VALIDATING for one in live)
        return MadeQuote(now_s, found, num_unchecked)

    async def _known(self, owner: str) -> list[KnownBatch]:
        store = self._service.store
        own = await store.read(period_rows.known_batches, owner)
        return own if len(own) >= FEWEST_BATCHES else await store.read(period_rows.known_batches, None)

    def _pool(self, keys: Mapping[str, str]) -> list[PoolBatch]:
        """Batches that the engine has.

        Args:
            keys: key of each live batch.
        """
        pool, before_s = [], 0.0
        for one in self._service.outlooks.all():
            # ``needed_s`` is of the batch and of all before it that can end in time.
            pool.append(PoolBatch(keys.get(one.batch_id, ""), max(one.needed_s - before_s, 0.0), one.left_s))
            if one.outlook != "infeasible":
                before_s = max(before_s, one.needed_s)
        return pool

    def promise(self, principal: Principal) -> Promise:
        """Promises for batches of this caller."""
        return partial(self._promised, principal)

    async def _promised(self, principal: Principal, file_id: str, accept_by_s: int) -> int:
        """Unix time by which nine of ten such batches would be done, if that is soon enough.

        Raises:
            InvalidRequestError: the time is over, or the file is no batch file.
            ConflictError: the quote is later; the message has the arithmetic.
        """
        size = await self.size_of_file(file_id, principal)
        window_s = accept_by_s - self._wall()
        if window_s <= 0.0:
            raise InvalidRequestError("'accept_by' is in the past.", param="accept_by", code="invalid_value")
        made = await self.quote(size, principal, (window_s,))
        (window,) = made.found.windows
        if window.p90_s > window_s:
            message = f"The batch cannot be promised by then. {arithmetic(made.found, window)}"
            raise ConflictError(message, param="accept_by", code="quote_too_late")
        return math.ceil(made.at_s + window.p90_s)


def _quoted(
    size: BatchSize, question: QuoteInputs, encoded: list[str], current: bytes | None, windows_s: tuple[float, ...]
) -> Quote:
    """In a thread: decodes the record and makes the quote."""
    periods = [period_decoder.decode(one) for one in encoded]
    if current is not None:
        now = period_decoder.decode(current)
        if periods and periods[-1].start_s == now.start_s:
            periods[-1].add(now)
        else:
            periods.append(now)
    return quote(size, replace(question, periods=periods), windows_s)


def extrapolated(measured: FileSize, compiled: Sequence[CompiledLine], num_bytes: int) -> BatchSize:
    """Size of the whole file, from the bytes of all lines and the tokens of some.

    Args:
        num_bytes: bytes of the prompts of ``compiled``.
    """
    rows = [prompt for line in compiled for prompt in line.prompts]
    row_tokens = sum(map(len, rows))
    line_tokens = sum(sum(map(len, {tuple(prompt) for prompt in line.prompts})) for line in compiled)
    sample_bytes = max(num_bytes, 1)
    prompt_tokens = max(round(row_tokens * measured.prompt_bytes / sample_bytes), 1)
    new_tokens = max(round(line_tokens * measured.new_bytes / sample_bytes), 1)
    return BatchSize(
        num_lines=measured.num_lines,
        num_rows=max(round(measured.num_lines * len(rows) / len(compiled)), 1),
        prompt_tokens=prompt_tokens,
        new_tokens=min(new_tokens, prompt_tokens),
        limits=tuple(params.max_tokens for line in compiled for params in line.params),
    )
