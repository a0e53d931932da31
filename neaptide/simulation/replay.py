"""Replays a step log: the engine of today decides again what was decided then, and every difference is found.

The core gets the recorded messages at the recorded points between its steps, and an executor that makes steps as long,
and answers end where they did. What it decides by itself is compared step by step: who takes part with how many tokens,
who is admitted with how much from the cache, who is preempted, and the state of the KV cache afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from neaptide.engine.config import CacheConfig, EngineConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    CancelBatch,
    SetOffline,
    StepOutputs,
    ToEngine,
)
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import FinishReason, SamplingParams
from neaptide.engine.record.block_numbers import Ranges
from neaptide.engine.record.step_log import (
    AbortLine,
    AddLine,
    BatchLine,
    CancelLine,
    HeaderLine,
    IdleLine,
    Line,
    ObserveLine,
    OfflineLine,
    RowLine,
    StepLine,
    read_log,
)
from neaptide.engine.steps.plan import BatchShape, StepPlan, StepResult
from neaptide.estimator.recipes import build_cost_model, build_headroom
from neaptide.simulation.logged_requests import LoggedRequest, LoggedRequests

END_TOKEN_ID = 1
FIRST_BLOCK_TOKEN_ID = 2
"""Block number b is written as tokens b + 2, so that equal numbers, and only these, are equal text."""

OnStep = Callable[[StepLine, StepOutputs], None]


class ReplayError(ValueError):
    """The log is damaged, or of an engine that worked otherwise."""


@dataclass(slots=True)
class Replay:
    """How far the decisions agree."""

    steps: int
    """Replayed; the one that differs included."""
    difference: str | None
    """The first difference, in words; None if every step was decided as recorded."""


def replay(
    log: Path,
    *,
    cost_model: CostModel | None = None,
    headroom: HeadroomPredictor | None = None,
    on_step: OnStep | None = None,
) -> Replay:
    """Replays a log until its end or the first difference.

    cost_model, headroom: as the recorded engine had them when its log began; None makes them as the header says.
    on_step: called with each recorded step and what the core reported for it.

    Raises:
        ReplayError: the log cannot be replayed.
        ValueError, OSError: it cannot be read.
    """
    lines = list(read_log(log))
    if not lines or not isinstance(lines[0], HeaderLine):
        raise ReplayError(f"{log} is empty")
    if lines[0].scheduler.overlap_depth:
        raise ReplayError(
            f"{log} is of an engine that plans with a step in flight: its messages have no place between plans"
        )
    with TemporaryDirectory(prefix="neaptide-replay-") as directory:
        driver = _Driver(lines, Path(directory), cost_model, headroom)
        for line in lines[1:]:
            outputs = driver.feed(line)
            if isinstance(line, StepLine):
                if (difference := driver.difference(line)) is not None:
                    return Replay(driver.num_steps, difference)
                if on_step is not None:
                    on_step(line, outputs)
    return Replay(driver.num_steps, None)


class ReplayClock:
    """Implements ``Clock``: shows recorded readings one after the other, then the last one for good."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._readings: deque[float] = deque()

    def script(self, readings_s: Sequence[float]) -> None:
        self._readings = deque(readings_s)

    @property
    def is_exhausted(self) -> bool:
        return not self._readings

    def now(self) -> float:
        if self._readings:
            self._now_s = self._readings.popleft()
        return self._now_s

    def sleep_until(self, t_s: float) -> None:
        """Time is what the log says."""


@dataclass(slots=True)
class _Answer:
    """What the log knows of a request's answer; of one that has no end in the log, nothing."""

    prompt_tokens: int
    filler_id: int
    """Token of what is in no recorded block: no other request has it."""
    tail_start: int
    """Where the prompt's full blocks end."""
    tail: list[int] = field(default_factory=list)
    """Tokens of the full blocks from there on."""
    num_tokens: int = -1
    reason: FinishReason | None = None

    def token(self, position: int) -> int:
        """At a position of prompt and output."""
        index = position - self.tail_start
        return self.tail[index] if 0 <= index < len(self.tail) else self.filler_id


class ReplayExecutor:
    """Implements ``Executor``: results as recorded. ``line`` is the step that comes next."""

    def __init__(self, num_blocks: int, names: Sequence[LoggedRequest], answers: Sequence[_Answer]) -> None:
        self._num_blocks = num_blocks
        self._names = names
        self._answers = answers
        """By handle, as the names."""
        self.handles: dict[str, int] = {}
        """Of the requests that the engine has been told of; an id may come again when its request has ended."""
        self.line: StepLine | None = None
        self.plan: StepPlan | None = None
        """The last one."""

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def submit(self, plan: StepPlan) -> "ReplayExecutor":
        self.plan = plan
        return self

    def wait(self) -> StepResult:
        assert self.plan is not None
        result = StepResult.of(self.plan)
        if self.line is not None:
            result.is_whole = not self.line.in_parts
            result.errors = {self._names[int(h)].request_id: error for h, error in self.line.errors.items()}
        for index in np.flatnonzero(self.plan.sample).tolist():
            request_id, position = self.plan.request_ids[index], int(self.plan.output_position[index])
            result.token_ids[index] = self._token(request_id, position)
        return result

    def close(self) -> None: ...

    def _token(self, request_id: str, output_position: int) -> int:
        answer = self._answers[self.handles[request_id]]
        if answer.reason is FinishReason.STOP and output_position == answer.num_tokens:
            return END_TOKEN_ID
        return answer.token(answer.prompt_tokens + output_position)


class _Driver:
    """The core, and what leads it through the log."""

    def __init__(
        self,
        lines: Sequence[Line],
        directory: Path,
        cost_model: CostModel | None,
        headroom: HeadroomPredictor | None,
    ) -> None:
        header = lines[0]
        assert isinstance(header, HeaderLine)
        self._directory = directory
        self._block_size = header.block_size
        self.num_steps = 0
        self._num_batches = 0
        self._requests = LoggedRequests()
        for line in lines:
            self._requests.take(line)
        self._next_handle = 0
        self._answers = self._read_answers(lines)
        self._running: set[int] = set()
        self._one_token: set[int] = set()
        self._clock = ReplayClock()
        self._executor = ReplayExecutor(header.num_blocks, self._requests, self._answers)
        self._cost_model = cost_model or build_cost_model(header.recipe["cost_model"])
        cache = CacheConfig(block_size=header.block_size, enable_prefix_cache=header.prefix_cache)
        self._core = EngineCore(
            EngineConfig(cache=cache, scheduler=header.scheduler),
            self._executor,
            self._cost_model,
            headroom or build_headroom(header.recipe["headroom"], header.num_blocks),
            self._clock,
            frozenset({END_TOKEN_ID}),
        )

    # ---- driving ----

    def feed(self, line: Line) -> StepOutputs:
        """Gives the core a message, or has it make a step."""
        if isinstance(line, StepLine):
            return self._step(line)
        if isinstance(line, IdleLine):
            self._clock.script([line.start_s])
            self._executor.plan = self._executor.line = None
            self._core.step()
            if self._executor.plan is not None:
                raise ReplayError(f"at {line.start_s} s nobody could run, and now somebody can")
        elif isinstance(line, ObserveLine):
            self._cost_model.observe(BatchShape(*line.shape), line.seconds)
        elif not isinstance(line, (HeaderLine, RowLine)):
            self._core.handle(self._message(line))
        return StepOutputs([], [])

    def _step(self, line: StepLine) -> StepOutputs:
        self.num_steps += 1
        start_s, *planned_s, end_s = line.t
        self._clock.script([start_s, *(planned_s or [start_s]), end_s])
        self._executor.plan, self._executor.line = None, line
        return self._core.step()

    def _message(self, line: Line) -> ToEngine:
        if isinstance(line, AddLine):
            return AddRequest(
                line.id,
                self._next_prompt(),
                _params(line.max_tokens, line.scores_prompt),
                line.tier,
                line.arrival_s,
                line.ttft_slo_s,
                line.tpot_slo_s,
            )
        if isinstance(line, BatchLine):
            return self._batch(line)
        if isinstance(line, AbortLine):
            self._clock.script([line.now_s])
            return AbortRequest(line.ids, FinishReason(line.reason))
        if isinstance(line, CancelLine):
            return CancelBatch(line.id)
        assert isinstance(line, OfflineLine)
        return SetOffline(line.paused)

    def _batch(self, line: BatchLine) -> AddBatch:
        prompts = {row: self._next_prompt() for row, *_ in line.rows}
        stem = self._directory / str(self._num_batches)
        self._num_batches += 1
        with TokenFileWriter(stem) as writer:
            for row in range(max(prompts, default=-1) + 1):
                writer.append(prompts.get(row, []))
        scored = set(line.scores_prompt)
        kinds = {(max_tokens, row in scored): 0 for row, _, max_tokens in line.rows}
        for index, kind in enumerate(kinds):
            kinds[kind] = index
        if line.order:
            self._sort_rows_by(line)
        self._clock.script([line.now_s])
        return AddBatch(
            line.id,
            str(stem),
            [row for row, *_ in line.rows],
            [_params(*kind) for kind in kinds],
            [kinds[max_tokens, row in scored] for row, _, max_tokens in line.rows],
            [],
            line.deadline_s,
        )

    def _sort_rows_by(self, line: BatchLine) -> None:
        """The policy sorts rows by their text, which the log does not have: the recorded order instead."""
        rank = {line.rows[index][0]: position for position, index in enumerate(line.order)}
        self._core.scheduler.queues.pool.row_key = lambda tokens, row: rank.get(row, 0)

    # ---- comparing ----

    def difference(self, line: StepLine) -> str | None:
        """The first thing in which the step just made differs from ``line``."""
        where = f"step {line.step} at {line.t[0]:.6f} s"
        plan, handles, name = self._executor.plan, self._executor.handles, self._name
        if plan is None:
            return f"{where}: nobody runs, {len(line.join) + len(line.chunks)} requests did"
        if not self._clock.is_exhausted:
            raise ReplayError(f"{where}: the engine read its clock less often than when the log was written")
        one_token = self._one_token.difference(line.leave).union(line.join)
        expected = dict(line.chunks) | dict.fromkeys(one_token, 1)
        named = [handles[request_id] for request_id in plan.request_ids]
        actual = dict(zip(named, plan.num_tokens.tolist(), strict=True))
        for handle in sorted(expected.keys() | actual.keys()):
            before, now = expected.get(handle, 0), actual.get(handle, 0)
            if before != now:
                return f"{where}: {name(handle)} computes {now} tokens, the log says {before}"
        self._running.difference_update(line.preempt)
        cached = dict(zip(named, plan.num_computed.tolist(), strict=True))
        admitted = {handle: tokens for handle, tokens in cached.items() if handle not in self._running}
        for handle in sorted(admitted.keys() | dict(line.admit).keys()):
            found, logged = admitted.get(handle), dict(line.admit).get(handle)
            if found != logged:
                return f"{where}: {name(handle)} is admitted with {found} cached tokens, the log says {logged}"
        gone = {handle for handle, *_ in line.end}
        self._running |= admitted.keys()
        self._running -= gone
        self._one_token = one_token - gone
        return self._state_difference(where, line)

    def _state_difference(self, where: str, line: StepLine) -> str | None:
        queues = self._core.scheduler.queues
        running = {self._executor.handles[request.request_id] for request in queues.running()}
        if running != self._running:
            changed = ", ".join(self._name(handle) for handle in sorted(running ^ self._running))
            return f"{where}: after it, these hold KV in one run only: {changed}"
        occupancy = self._core.kv.occupancy()
        blocks = [occupancy.cached, occupancy.online, occupancy.offline]
        if blocks != line.kv:
            return f"{where}: cached, online and offline KV blocks are {blocks}, the log says {line.kv}"
        return None

    def _name(self, handle: int) -> str:
        return self._requests[handle].request_id

    # ---- tokens that stand for the recorded blocks ----

    def _read_answers(self, lines: Sequence[Line]) -> list[_Answer]:
        ends = [end for line in lines if isinstance(line, StepLine) for end in line.end]
        blocks = [request.blocks for request in self._requests] + [end[3] for end in ends]
        first_filler = FIRST_BLOCK_TOKEN_ID + max((sum(pair) for b in blocks for pair in _pairs(b)), default=0)
        answers = [
            _Answer(
                request.prompt_tokens,
                first_filler + handle,
                request.prompt_tokens // self._block_size * self._block_size,
            )
            for handle, request in enumerate(self._requests)
        ]
        for handle, num_tokens, reason, tail in ends:
            answer = answers[handle]
            answer.num_tokens, answer.reason = num_tokens, FinishReason(reason)
            answer.tail = list(self._tokens(tail))
        return answers

    def _next_prompt(self) -> list[int]:
        """The prompt of the request that the log names next; from now on its id means this request."""
        request, answer = self._requests[self._next_handle], self._answers[self._next_handle]
        self._executor.handles[request.request_id] = self._next_handle
        self._next_handle += 1
        prompt = list(self._tokens(request.blocks))
        return prompt + [answer.token(position) for position in range(len(prompt), request.prompt_tokens)]

    def _tokens(self, blocks: Ranges) -> Iterator[int]:
        for first, count in _pairs(blocks):
            for number in range(first, first + count):
                yield from [FIRST_BLOCK_TOKEN_ID + number] * self._block_size


def _pairs(blocks: Ranges) -> Iterator[tuple[int, int]]:
    """First number and count of every run."""
    return zip(blocks[::2], blocks[1::2], strict=True)


def _params(max_tokens: int, scores_prompt: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if scores_prompt else None)
