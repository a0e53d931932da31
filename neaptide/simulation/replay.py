"""Replays a step log: the engine of today decides again what was decided then, and every difference is found.

The core gets the recorded messages at the recorded points between its steps, and an executor that makes steps as long,
and answers end where they did. What it decides by itself is compared step by step: who takes part with how many tokens,
who is admitted with how much from the cache, who is preempted, and the state of the KV cache afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from neaptide.engine.config import CacheConfig, EngineConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.messages import StepOutputs
from neaptide.engine.record.step_log import (
    AbortLine,
    BatchLine,
    HeaderLine,
    IdleLine,
    Line,
    ObserveLine,
    RowLine,
    StepLine,
    read_log,
)
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.recipes import build_cost_model, build_headroom
from neaptide.simulation.replay_executor import END_TOKEN_ID, ReplayClock, ReplayExecutor
from neaptide.simulation.replay_messages import ReplayMessages

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
        self.num_steps = 0
        self._messages = ReplayMessages(lines, header.block_size, directory)
        self._running: set[int] = set()
        self._one_token: set[int] = set()
        self._clock = ReplayClock()
        messages = self._messages
        self._executor = ReplayExecutor(header.num_blocks, messages.requests, messages.answers, messages.handles)
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
        if POLICIES[header.scheduler.policy].row_key is not None:
            self._core.scheduler.queues.pool.row_key = messages.row_rank

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
            if isinstance(line, (AbortLine, BatchLine)):
                self._clock.script([line.now_s])
            self._core.handle(self._messages.message(line))
        return StepOutputs([], [])

    def _step(self, line: StepLine) -> StepOutputs:
        self.num_steps += 1
        start_s, *planned_s, end_s = line.t
        self._clock.script([start_s, *(planned_s or [start_s]), end_s])
        self._executor.plan, self._executor.line = None, line
        return self._core.step()

    # ---- comparing ----

    def difference(self, line: StepLine) -> str | None:
        """The first thing in which the step just made differs from ``line``."""
        where = f"step {line.step} at {line.t[0]:.6f} s"
        plan, handles, name = self._executor.plan, self._messages.handles, self._name
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
        running = {self._messages.handles[request.request_id] for request in queues.running()}
        if running != self._running:
            changed = ", ".join(self._name(handle) for handle in sorted(running ^ self._running))
            return f"{where}: after it, these hold KV in one run only: {changed}"
        occupancy = self._core.kv.occupancy()
        blocks = [occupancy.cached, occupancy.online, occupancy.offline]
        if blocks != line.kv:
            return f"{where}: cached, online and offline KV blocks are {blocks}, the log says {line.kv}"
        return None

    def _name(self, handle: int) -> str:
        return self._messages.requests[handle].request_id
