"""Replays a step log: the current engine decides again, and every difference is found.

The core gets the recorded messages at the recorded points between its steps. The executor makes steps as long, and
answers end, as recorded. The core's own decisions are compared step by step: the scheduled requests and their tokens,
admissions with their cached tokens, preemptions, and the KV cache afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from neaptide.engine.arrays import IntArray
from neaptide.engine.config import CacheConfig, EngineConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.messages import RequestOutput, StepOutputs
from neaptide.engine.observer import EngineObserver
from neaptide.engine.record.step_log import (
    AbortLine,
    BatchLine,
    HeaderLine,
    IdleLine,
    Line,
    ObserveLine,
    PlanLine,
    RowLine,
    StepLine,
    read_log,
)
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.policies import find_policy
from neaptide.engine.steps.plan import BatchShape, StepResult
from neaptide.engine.steps.step import Step
from neaptide.estimator.recipes import build_cost_model, build_headroom
from neaptide.simulation.replay_executor import END_TOKEN_ID, ReplayClock, ReplayExecutor
from neaptide.simulation.replay_messages import ReplayMessages

OnStep = Callable[[StepLine, StepOutputs], None]


class ReplayError(ValueError):
    """The log is damaged, or from an engine that worked differently."""


@dataclass(slots=True)
class Replay:
    """How far the decisions agree."""

    steps: int
    """Replayed steps, including the one that differs."""
    difference: str | None
    """Description of the first difference; None if every decision is as recorded."""


def replay(
    log: Path,
    *,
    cost_model: CostModel | None = None,
    headroom: HeadroomPredictor | None = None,
    on_step: OnStep | None = None,
    observers: Sequence[EngineObserver] = (),
) -> Replay:
    """Replays a log until its end or the first difference.

    cost_model, headroom: in the recorded engine's state at the begin of its log; None makes them from the header.
    on_step: called with each recorded step and the core's outputs for it.
    observers: of the replaying core.

    Raises:
        ReplayError: the log cannot be replayed.
        ValueError, OSError: the log cannot be read.
    """
    lines = list(read_log(log))
    if not lines or not isinstance(lines[0], HeaderLine):
        raise ReplayError(f"{log} is empty")
    with TemporaryDirectory(prefix="neaptide-replay-") as directory:
        driver = _Driver(lines, Path(directory), cost_model, headroom, observers)
        for line in lines[1:]:
            outputs = driver.feed(line)
            if isinstance(line, StepLine):
                if (difference := driver.difference(line)) is not None:
                    return Replay(driver.num_steps, difference)
                if on_step is not None:
                    on_step(line, outputs)
    return Replay(driver.num_steps, None)


class _ReplayWatch(EngineObserver):
    """Remembers the last planned and the last committed step."""

    def __init__(self) -> None:
        self.planned_step: Step | None = None
        self.done_step: Step | None = None

    def forget(self) -> None:
        self.planned_step = self.done_step = None

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self.planned_step = step

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        self.done_step = step

    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        self.done_step = step


class _Driver:
    """The core, driven through the log."""

    def __init__(
        self,
        lines: Sequence[Line],
        directory: Path,
        cost_model: CostModel | None,
        headroom: HeadroomPredictor | None,
        observers: Sequence[EngineObserver],
    ) -> None:
        header = lines[0]
        assert isinstance(header, HeaderLine)
        self.num_steps = 0
        self._messages = ReplayMessages(lines, header.block_size, directory)
        self._overlaps = header.scheduler.overlap_depth > 0
        self._outputs: list[RequestOutput] = []
        """Outputs of plannings without a step to commit."""
        self._gone: set[int] = set()
        """Handles of requests that have ended."""
        self._running: set[int] = set()
        self._one_token: set[int] = set()
        self._clock = ReplayClock()
        self._watch = _ReplayWatch()
        messages = self._messages
        self._executor = ReplayExecutor(header.num_blocks, messages.requests, messages.answers, messages.handles)
        self._cost_model = cost_model or build_cost_model(header.recipe["cost_model"])
        cache = CacheConfig(
            block_size=header.block_size,
            enable_prefix_cache=header.prefix_cache,
            num_host_blocks=header.num_host_blocks,
            slot_copies=header.slot_copies,
            shared_reads=header.shared_reads,
        )
        self._core = EngineCore(
            EngineConfig(cache=cache, scheduler=header.scheduler),
            self._executor,
            self._cost_model,
            headroom or build_headroom(header.recipe["headroom"], header.num_blocks),
            self._clock,
            frozenset({END_TOKEN_ID}),
            observers=[self._watch, *observers],
        )
        if find_policy(header.scheduler.policy).row_key is not None:
            self._core.scheduler.queues.pool.row_key = messages.row_rank

    # ---- driving ----

    def feed(self, line: Line) -> StepOutputs:
        """Handles a line: sends a message, or runs a step."""
        if isinstance(line, StepLine):
            return self._step(line)
        if isinstance(line, PlanLine):
            self._plan(line.t)
        elif isinstance(line, IdleLine):
            self._plan([line.start_s])
            if self._watch.planned_step is not None:
                raise ReplayError(f"at {line.start_s} s no request could run in the log, but now one can")
        elif isinstance(line, ObserveLine):
            self._cost_model.observe(BatchShape(*line.shape), line.seconds)
        elif not isinstance(line, (HeaderLine, RowLine)):
            if isinstance(line, (AbortLine, BatchLine)):
                self._clock.script([line.now_s])
            self._core.handle(self._messages.message(line))
        return StepOutputs([], [])

    def _plan(self, readings_s: Sequence[float]) -> None:
        """Makes the core plan while no step is in flight, without committing one."""
        if self._core.has_step_in_flight:
            raise ReplayError(f"at {readings_s[0]} s no step was in flight in the log, but now one is")
        self._watch.forget()
        self._clock.script(readings_s)
        self._outputs += self._core.step().outputs

    def _step(self, line: StepLine) -> StepOutputs:
        self.num_steps += 1
        start_s, *planned_s, end_s = line.t
        if not self._overlaps:
            self._clock.script([start_s, *(planned_s or [start_s]), end_s])
        elif line.next:
            self._clock.script([*line.next, end_s])
        else:
            raise ReplayError(f"step {line.step} does not say when the next step was planned")
        self._watch.forget()
        self._executor.expect(line)
        outputs = self._core.step()
        before, self._outputs = self._outputs, []
        return StepOutputs(before + outputs.outputs, outputs.stats)

    # ---- comparing ----

    def difference(self, line: StepLine) -> str | None:
        """The first difference between the last step and ``line``."""
        where = f"step {line.step} at {line.t[0]:.6f} s"
        step, handles, name = self._watch.done_step, self._messages.handles, self._name
        if step is None:
            return f"{where}: no request runs, but {len(line.join) + len(line.chunks)} did in the log"
        if self._overlaps and (self._watch.planned_step is None) != (len(line.next) == 1):
            return f"{where}: the log disagrees on whether a step is planned while it runs"
        if not self._clock.is_exhausted:
            raise ReplayError(f"{where}: the engine read its clock less often than in the log")
        one_token = self._one_token.difference(line.leave).union(line.join)
        expected = dict(line.chunks) | dict.fromkeys(one_token, 1)
        named = [handles[request_id] for request_id in step.plan.request_ids]
        actual = self._present(named, step.plan.num_tokens)
        for handle in sorted(expected.keys() | actual.keys()):
            before, now = expected.get(handle, 0), actual.get(handle, 0)
            if before != now:
                return f"{where}: {name(handle)} computes {now} tokens, the log says {before}"
        preempted = [handles[request_id] for request_id in step.preempted.request_ids]
        if preempted != line.preempt:
            names = [", ".join(map(name, found)) or "no request" for found in (preempted, line.preempt)]
            return f"{where}: it preempts {names[0]}, the log says {names[1]}"
        self._running.difference_update(line.preempt)
        cached = self._present(named, step.plan.num_computed)
        admitted = {handle: tokens for handle, tokens in cached.items() if handle not in self._running}
        for handle in sorted(admitted.keys() | dict(line.admit).keys()):
            found, logged = admitted.get(handle), dict(line.admit).get(handle)
            if found != logged:
                return f"{where}: {name(handle)} is admitted with {found} cached tokens, the log says {logged}"
        gone = {handle for handle, *_ in line.end}
        self._running |= admitted.keys()
        self._running -= gone
        self._gone |= gone
        self._one_token = one_token - gone
        return self._state_difference(where, line)

    def _present(self, handles: Sequence[int], values: IntArray) -> dict[int, int]:
        """Values of a step's requests, without those that ended in the previous step while this one was in flight."""
        pairs = zip(handles, values.tolist(), strict=True)
        return {handle: value for handle, value in pairs if handle not in self._gone}

    def _state_difference(self, where: str, line: StepLine) -> str | None:
        scheduler, handles = self._core.scheduler, self._messages.handles
        running = {handles[request.request_id] for request in scheduler.queues.running()}
        # A step planned after this one has admitted others, which are compared when it is done. A plan that only
        # preempted is recorded with the next step.
        expected = self._running - {handles[request_id] for request_id in scheduler.preempted.request_ids}
        if running != expected and self._watch.planned_step in (None, self._watch.done_step):
            changed = ", ".join(self._name(handle) for handle in sorted(running ^ expected))
            return f"{where}: after it, these hold KV in only one of the runs: {changed}"
        occupancy = self._core.kv.occupancy()
        blocks = [occupancy.cached, occupancy.online, occupancy.offline]
        if blocks != line.kv:
            return f"{where}: cached, online and offline KV blocks are {blocks}, the log says {line.kv}"
        return None

    def _name(self, handle: int) -> str:
        return self._messages.requests[handle].request_id
