"""The step log: what the engine was told, when it planned, and what it decided; enough to replay a run exactly.

JSON Lines, one struct of this module per line, the field ``is`` says which. Prompts are written as numbers of
interned blocks, never as text or token ids. Requests are written as *handles*: integers in the order in which the log
names them, a batch's rows one after the other. The format is described in docs/simulation.md.
"""

import gzip
import logging
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from neaptide.engine.batch import BatchShape, StepPlan, StepResult
from neaptide.engine.config import EngineConfig, SchedulerConfig
from neaptide.engine.messages import AbortRequest, AddBatch, AddRequest, CancelBatch, SetOffline, ToEngine
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import FinishReason, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.engine.stats import StepTimer

logger = logging.getLogger(__name__)

VERSION = 1
GZIP_MAGIC = b"\x1f\x8b"
Ranges = list[int]
"""Ascending runs of block numbers, flat: first number, count, first number, count, ..."""


class _Line(msgspec.Struct, tag_field="is", omit_defaults=True):
    pass


class HeaderLine(_Line, tag="header"):
    version: int
    scheduler: SchedulerConfig
    block_size: int
    prefix_cache: bool
    num_blocks: int
    recipe: dict[str, Any]
    """How the cost model and the headroom predictor were made; the engine does not look inside."""


class AddLine(_Line, tag="add"):
    """An ``AddRequest``; it takes the next handle."""

    id: str
    tier: Tier
    arrival_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    max_tokens: int
    tokens: int
    """Of the prompt."""
    blocks: Ranges
    """The prompt's full blocks: equal numbers are equal text behind equal text."""
    scores_prompt: bool = False
    """It takes no prefix hit, because its prompt's log-probabilities are wanted."""


class BatchLine(_Line, tag="batch"):
    """An ``AddBatch``; each row takes the next handle."""

    id: str
    now_s: float
    deadline_s: float
    rows: list[tuple[int, int, int, Ranges]]
    """Row, prompt tokens, max_tokens, full blocks."""
    scores_prompt: list[int] = []
    """Rows that take no prefix hit."""
    order: list[int] = []
    """Under a policy that sorts rows by their text: the order of ``rows``, as indices into it."""


class AbortLine(_Line, tag="abort"):
    ids: list[str]
    reason: int
    now_s: float


class CancelLine(_Line, tag="cancel"):
    id: str


class OfflineLine(_Line, tag="offline"):
    paused: bool


class ObserveLine(_Line, tag="observe"):
    """A measured step that the cost model was shown before the engine's first."""

    shape: list[int]
    """The fields of ``BatchShape``, in order."""
    seconds: float


class IdleLine(_Line, tag="idle"):
    """A step was planned for and nobody could run."""

    start_s: float


class StepLine(_Line, tag="step"):
    """A step: its plan as differences to the step before, and what ended with it."""

    step: int
    t: list[float]
    """Seconds: planning began, ended (left out if at once), the step was done."""
    predicted: list[float]
    """Seconds: prediction, margin, budget (0 for none); rounded to nanoseconds."""
    kv: list[int]
    """Blocks after the step: cached, held by online, held by offline."""
    join: list[int] = []
    """Requests that compute one token now and did not in the step before ..."""
    leave: list[int] = []
    """... and those that did."""
    chunks: list[tuple[int, int]] = []
    """Every request that computes more than one token: handle, tokens."""
    admit: list[tuple[int, int]] = []
    """Requests that got their blocks in this step: handle, tokens found in the cache."""
    preempt: list[int] = []
    end: list[tuple[int, int, int, Ranges]] = []
    """Requests that ended since the step before: handle, output tokens, ``FinishReason``, the full blocks that end
    in the output."""
    errors: dict[str, str] = {}
    """Requests (handles) that the executor failed."""
    in_parts: bool = False
    """The step had to be run in parts; nothing was learnt from its time."""


Line = HeaderLine | AddLine | BatchLine | AbortLine | CancelLine | OfflineLine | ObserveLine | IdleLine | StepLine


class _BlockNumbers:
    """Numbers for prompt prefixes in whole blocks: the same number is the same block behind the same blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * 4
        self._numbers: dict[int, int] = {}
        """By 64-bit hash: far too few blocks for two of them to meet."""

    def intern(self, parent: int, content: bytes) -> tuple[int, Ranges]:
        """The number of the last full block of int32 tokens, and the numbers of all; ``parent`` is what stands before
        the first."""
        numbers, expected = self._numbers, -1
        ranges: Ranges = []
        for start in range(0, len(content) - self._block_bytes + 1, self._block_bytes):
            key = hash((parent, content[start : start + self._block_bytes]))
            parent = numbers.setdefault(key, len(numbers))
            if parent == expected:
                ranges[-1] += 1
            else:
                ranges += (parent, 1)
            expected = parent + 1
        return parent, ranges

    def root(self, salt: bytes) -> int:
        """The parent of first blocks: negative, so that no block has it."""
        return -1 - self._numbers.setdefault(hash(salt), len(self._numbers)) if salt else -1


class StepRecorder:
    """Writes the step log of one engine. A disk that refuses ends the log, not the engine.

    Args:
        out: closed by ``close``.
        recipe: how to make the cost model and the headroom predictor again, for ``replay``.
    """

    def __init__(self, out: IO[bytes], config: EngineConfig, num_blocks: int, recipe: dict[str, Any]) -> None:
        self._out = out
        self._encode = msgspec.json.Encoder().encode
        self.failed = False
        """Whether the disk has refused a line."""
        self._block_size = config.cache.block_size
        self._numbers = _BlockNumbers(self._block_size)
        self._handles: dict[str, int] = {}
        self._num_handles = 0
        self._rows: dict[str, dict[int, int]] = {}
        """Handles of the rows of every batch."""
        self._last_block: dict[int, int] = {}
        """By handle: the number of the prompt's last full block."""
        self._running: set[int] = set()
        self._one_token: set[int] = set()
        self._ended: list[tuple[int, int, int, Ranges]] = []
        self._ended_ids: dict[str, int] = {}
        """Handles of requests that ended since the last step was written: its plan may still name them."""
        self._row_key = POLICIES[config.scheduler.policy].row_key
        prefix_cache = config.cache.enable_prefix_cache
        self._write(HeaderLine(VERSION, config.scheduler, self._block_size, prefix_cache, num_blocks, recipe))

    def observed(self, shape: BatchShape, seconds: float) -> None:
        """The cost model was shown a step of the warm-up."""
        fields = [getattr(shape, name) for name in BatchShape.__slots__]
        self._write(ObserveLine(fields, seconds))

    def message(self, message: ToEngine, now_s: float) -> None:
        """The engine takes in a message at ``now_s``."""
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AddBatch):
            self._add_batch(message, now_s)
        elif isinstance(message, AbortRequest):
            self._write(AbortLine(message.request_ids, message.reason, now_s))
        elif isinstance(message, CancelBatch):
            self._write(CancelLine(message.batch_id))
        elif isinstance(message, SetOffline):
            self._write(OfflineLine(message.paused))

    def idle(self, start_s: float) -> None:
        """Planning at ``start_s`` found nobody who could run."""
        self._write(IdleLine(start_s))

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request ends, in the running step or between steps."""
        handle = self._handle(request.request_id)
        num_full = request.num_prompt_tokens // self._block_size
        tail = array("i", request.token_ids[num_full * self._block_size :]).tobytes()
        _, ranges = self._numbers.intern(self._last_block.pop(handle), tail)
        self._ended.append((handle, request.num_output_tokens, reason, ranges))
        del self._handles[request.request_id]
        self._ended_ids[request.request_id] = handle

    def step(self, plan: StepPlan, result: StepResult, timer: StepTimer, scheduler: Scheduler) -> None:
        """A step is done and committed."""
        pool = scheduler.queues.kv.pool
        planning = [timer.start_s] if timer.scheduled_at_s == timer.start_s else [timer.start_s, timer.scheduled_at_s]
        line = StepLine(
            step=plan.step,
            t=[*planning, timer.executed_at_s],
            predicted=[round(plan.predicted_s, 9), round(plan.margin_s, 9), round(plan.budget_s, 9)],
            kv=[pool.num_cached, pool.num_online, pool.num_offline],
            preempt=[self._handle(request_id) for request_id in scheduler.preemptor.count.request_ids],
            end=self._ended,
            errors={str(self._handle(request_id)): error for request_id, error in result.errors.items()},
            in_parts=not result.is_whole,
        )
        self._running.difference_update(line.preempt)
        one_token = []
        gone = {handle for handle, *_ in self._ended}
        for part in plan.scheduled:
            handle = self._handle(part.request_id)
            num_tokens = len(part.token_ids)
            if handle not in self._running:
                self._running.add(handle)
                line.admit.append((handle, part.num_computed_tokens))
            if num_tokens == 1:
                one_token.append(handle)
            else:
                line.chunks.append((handle, num_tokens))
        now = set(one_token)
        line.join = [handle for handle in one_token if handle not in self._one_token]
        line.leave = sorted(self._one_token - now)
        self._one_token = now - gone
        self._running -= gone
        self._ended, self._ended_ids = [], {}
        self._write(line)

    def close(self) -> None:
        self._out.close()

    def _add(self, message: AddRequest) -> None:
        handle = self._next_handle()
        self._handles[message.request_id] = handle
        ranges = self._intern_prompt(handle, array("i", message.prompt_token_ids).tobytes(), message.salt)
        self._write(
            AddLine(
                message.request_id,
                message.tier,
                message.arrival_s,
                message.ttft_slo_s,
                message.tpot_slo_s,
                message.params.max_tokens,
                len(message.prompt_token_ids),
                ranges,
                message.params.prompt_logprobs is not None,
            )
        )

    def _add_batch(self, message: AddBatch, now_s: float) -> None:
        try:
            tokens = TokenFile(message.path)
        except (OSError, ValueError):
            return  # the engine refuses it as a whole
        if not message.rows or max(message.rows) >= len(tokens):
            return  # the same
        params = [message.params_table[index] for index in message.params_index]
        line = BatchLine(message.batch_id, now_s, message.deadline_s, [])
        handles = self._rows.setdefault(message.batch_id, {})
        for row, own in zip(message.rows, params, strict=True):
            handle = handles[row] = self._next_handle()
            ranges = self._intern_prompt(handle, tokens.content(row), message.salt)
            line.rows.append((row, tokens.num_tokens(row), own.max_tokens, ranges))
        line.scores_prompt = [
            row for row, own in zip(message.rows, params, strict=True) if own.prompt_logprobs is not None
        ]
        if self._row_key is not None:
            keys = [self._row_key(tokens, row) for row in message.rows]
            line.order = sorted(range(len(keys)), key=keys.__getitem__)
        self._write(line)

    def _intern_prompt(self, handle: int, content: bytes, salt: bytes) -> Ranges:
        self._last_block[handle], ranges = self._numbers.intern(self._numbers.root(salt), content)
        return ranges

    def _next_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles - 1

    def _handle(self, request_id: str) -> int:
        handle = self._handles.get(request_id)
        if handle is not None:
            return handle
        batch_id, _, row = request_id.rpartition(":")
        rows = self._rows.get(batch_id, {})
        if row.isdecimal() and int(row) in rows:  # first, because a row that ended may have been submitted again
            handle = self._handles[request_id] = rows.pop(int(row))
            return handle
        return self._ended_ids[request_id]

    def _write(self, line: Line) -> None:
        if self.failed:
            return
        try:
            self._out.write(self._encode(line) + b"\n")
        except OSError as error:
            logger.error("the step log cannot be written: %s", error)
            self.failed = True


def create_log(path: str | Path) -> IO[bytes]:
    """Opens a new step log for writing; compressed if the name ends in ``.gz``, the same bytes every time."""
    if str(path).endswith(".gz"):
        raw = open(path, "wb")  # noqa: SIM115 (closed below)
        out = _OwningGzip(raw)
        return cast(IO[bytes], out)
    return open(path, "wb")


class _OwningGzip(gzip.GzipFile):
    """Without name and time in its header, and closing the file below it."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(filename="", mode="wb", fileobj=raw, mtime=0)
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()


def read_log(path: str | Path) -> Iterator[Line]:
    """The lines of a step log. One that was cut off, by the end of its engine, ends before what is cut.

    Raises:
        ValueError: the file is not a step log of this version, or a line is damaged.
        OSError: it cannot be read.
    """
    decoder = msgspec.json.Decoder(Line)
    for number, text in enumerate(_whole_lines(path), 1):
        try:
            line: Line = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if (number == 1) != isinstance(line, HeaderLine):
            raise ValueError(f"{path}, line {number}: a step log has one header, its first line")
        if isinstance(line, HeaderLine) and line.version != VERSION:
            raise ValueError(f"{path} is a step log of version {line.version}, not {VERSION}")
        yield line


def _whole_lines(path: str | Path) -> Iterator[bytes]:
    with open(path, "rb") as raw:
        if raw.peek(2)[:2] != GZIP_MAGIC:
            yield from (text for text in raw if text.endswith(b"\n"))
            return
        with gzip.GzipFile(fileobj=raw) as lines:
            try:
                yield from (text for text in lines if text.endswith(b"\n"))
            except EOFError:
                return
