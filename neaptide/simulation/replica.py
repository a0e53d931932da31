"""One engine core on its own virtual clock. Its caller hands it requests and runs its loop one turn at a time.

A simulation of one engine drives one replica. A cluster drives several, always the one whose clock is furthest behind.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from neaptide.engine.clock import VirtualClock
from neaptide.engine.core import EngineCore
from neaptide.engine.messages import AddBatch, AddRequest, CancelBatch, RequestOutput, StepOutputs
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.recipes import build_cost_model, build_headroom
from neaptide.executors.simulated.trace_executor import END_TOKEN_ID, PROMPT_VOCABULARY, StepTally, TraceExecutor
from neaptide.loadgen.workloads.traces import TraceRequest, token_ids
from neaptide.simulation.measures import Measures
from neaptide.simulation.offline_feed import OFFLINE_PREFIX
from neaptide.simulation.pools.inline_planner import InlinePlanner
from neaptide.simulation.pools.ledger import RowLedger
from neaptide.simulation.pools.served_planner import ServedPlanner
from neaptide.simulation.scenario import Scenario

ONLINE_PREFIX = "online-"
BLOCKED_WAIT_S = 0.005
"""As in the real loop, after planning that found no request that can run."""
MAX_BLOCKED_S = 60.0
"""A policy that runs no request for this long although there is work never will."""


class SimulationError(RuntimeError):
    """The engine is stuck: it has work, but runs no request."""


class ReplicaRows(Protocol):
    """Where an engine's offline rows come from."""

    @property
    def may_be_empty(self) -> bool:
        """Whether an empty pool is acceptable now."""
        ...

    @property
    def next_arrival_s(self) -> float:
        """When the next row arrives by itself; infinite if none will."""
        ...

    @property
    def first_generation_done(self) -> bool: ...

    def messages(self, waiting: int, now_s: float) -> Iterator[AddBatch]:
        """Yields the jobs to submit now, while ``waiting`` rows wait in the engine. The caller must submit each job
        before it asks for the next."""
        ...

    def waits_since_s(self, batch_id: str, now_s: float) -> float:
        """When the rows of a job that is submitted now arrived."""
        ...

    def row_ended(self, request_id: str, now_s: float) -> None: ...

    def output_tokens(self, request_id: str) -> int:
        """The true output length of a row."""
        ...

    def reached_tokens(self, request_id: str) -> int:
        """Tokens that a row had reached in an engine that was lost with it; 0 for a new row."""
        ...


class _Watch(EngineObserver):
    """Records what every plan starts and aborts, and measures the processor time of planning.

    That time enters no decision. On the virtual clock, planning takes what the profile says, so that a run has the same
    result on every machine.
    """

    def __init__(self, replica: "SimulatedReplica") -> None:
        self._replica = replica
        self._began_s = 0.0

    def planning(self, now_s: float) -> None:
        self._replica.charge_planning()
        self._began_s = time.thread_time()

    def idle(self, start_s: float, scheduler: Scheduler) -> None:
        self._replica.check_pool(start_s)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self._replica.plan_s.append(time.thread_time() - self._began_s)
        for new in step.plan.new_requests:
            if new.request_id.startswith(OFFLINE_PREFIX):
                self._replica.row_started(new.request_id, draft.now_s)
        self._replica.check_pool(draft.now_s)

    def executed(self, step: Step, result: StepResult) -> None:
        self._replica.step_done(step, result)

    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        self._replica.num_aborted += 1


class SimulatedReplica:
    """
    Args:
        dry_from_s: from this time on, an empty pool counts as dry.
        start_s: initial time of its clock.
    """

    def __init__(
        self,
        scenario: Scenario,
        rows: ReplicaRows,
        observers: Sequence[EngineObserver] = (),
        dry_from_s: float = 0.0,
        start_s: float = 0.0,
    ) -> None:
        self._scenario = scenario
        self._clock = VirtualClock(start_s)
        self._rows = rows
        self._dry_from_s = dry_from_s
        self._inbox: deque[tuple[str, TraceRequest]] = deque()
        self._outputs: dict[str, int] = {}
        """True output lengths of the online requests handed in."""
        self._blocked_since_s = math.inf
        self._planner = self._build_planner()
        self.measures = Measures(scenario.tpot_slo_s)
        self.ledger = RowLedger()
        self.plan_s = array("d")
        """Wall time of every planning."""
        self.makespan_s: float | None = None
        """When the last row of the first generation ended."""
        self.dry_s: float | None = None
        """When the pool first ran dry."""
        self.num_failed = 0
        """Offline rows that failed."""
        self.online_ends_s: deque[float] = deque()
        """The reader removes what it has read."""
        self.online_prefill_tokens = 0
        """Online prompt tokens computed so far."""
        self.num_aborted = 0
        """Steps aborted for an online request."""
        self._tally = StepTally()
        """Tally of the last step."""
        self._swapped_blocks = 0
        """Blocks that the last step copied to or from host memory."""
        self._executor = self._build_executor()
        self.core = self._build_core([_Watch(self), *observers])

    def _build_planner(self) -> InlinePlanner | None:
        scenario = self._scenario
        if (order := scenario.order) is None:
            return None
        settings = order, scenario.profile, scenario.block_size, scenario.planning_scale, self._rows.output_tokens
        if scenario.planner_is_told:
            return InlinePlanner(*settings)
        return ServedPlanner(*settings, lambda: self.core.scheduler.queues.running_offline.values())

    def _build_executor(self) -> TraceExecutor:
        scenario = self._scenario
        return TraceExecutor(
            scenario.num_blocks,
            scenario.truth or RooflineModel.from_profile(scenario.device, scenario.overlap_kappa),
            self._clock,
            self._output_tokens,
            lambda request_id: request_id.startswith(ONLINE_PREFIX),
            scenario.step_noise,
            scenario.seed,
            layers=scenario.give_up.layers if scenario.give_up is not None else None,
            reached_tokens=self._reached_before,
        )

    def _build_core(self, observers: Sequence[EngineObserver]) -> EngineCore:
        scenario = self._scenario
        return EngineCore(
            scenario.engine_config(),
            self._executor,
            build_cost_model(scenario.recipe()["cost_model"]),
            build_headroom(scenario.headroom, scenario.num_blocks),
            self._clock,
            frozenset({END_TOKEN_ID}),
            observers,
        )

    # ---- from outside ----

    @property
    def now_s(self) -> float:
        return self._clock.now()

    @property
    def has_online(self) -> bool:
        queues = self.core.scheduler.queues
        return bool(self._inbox or queues.running_online or queues.waiting_online)

    def send(self, request_id: str, request: TraceRequest) -> None:
        """Sends an online request that has arrived. Requests must be sent in the order of arrival; they are handed in
        between steps."""
        self._inbox.append((request_id, request))

    def take_inbox(self) -> list[tuple[str, TraceRequest]]:
        """Removes and returns what was sent but not handed in yet."""
        taken = list(self._inbox)
        self._inbox.clear()
        return taken

    def withdraw_unstarted(self) -> list[str]:
        """Drops the offline jobs of which no row has started, and returns them."""
        jobs = self.ledger.withdraw_unstarted()
        for job in jobs:
            self.core.handle(CancelBatch(job))
        return jobs

    def lose(self) -> None:
        """Ends the replica. The work of its step in flight is lost with it."""
        self._executor.lose()

    def reached_tokens(self, request_id: str) -> int:
        """Tokens that an unfinished offline row has reached."""
        return self._executor.reached_tokens(request_id)

    def turn(self, until_s: float) -> bool:
        """Runs one round of the engine's loop: hands in what is due, then executes a step or waits until ``until_s`` at
        most. Returns False if there is nothing to do and nothing to wait for."""
        core, clock = self.core, self._clock
        self._hand_in()
        change_s = min(self._next_change_s, until_s)
        if not core.has_work:
            self.check_pool(clock.now())
            if change_s == math.inf:
                return False
            clock.sleep_until(change_s)
        elif core.plan_at_s > clock.now():
            clock.sleep_until(min(core.plan_at_s, change_s))
        else:
            arrival_s = self._inbox[0][1].arrival_s if self._inbox else math.inf
            self._executor.next_arrival_s = min(arrival_s, until_s)
            outputs = core.step()
            self._take_in(outputs)
            if outputs.stats or core.has_step_in_flight:
                self._blocked_since_s = math.inf
            else:
                self._blocked_since_s = min(self._blocked_since_s, clock.now())
                self._wait_for_change(until_s)
        return True

    # ---- the loop ----

    @property
    def _next_change_s(self) -> float:
        arrival_s = self._inbox[0][1].arrival_s if self._inbox else math.inf
        ready_s = self._planner.ready_s if self._planner is not None else math.inf
        return min(arrival_s, self._rows.next_arrival_s, ready_s)

    def _hand_in(self) -> None:
        now_s = self._clock.now()
        while self._inbox and self._inbox[0][1].arrival_s <= now_s:
            self._add_online(*self._inbox.popleft())
        pool = self.core.scheduler.queues.pool
        for message in self._rows.messages(len(pool), now_s):
            since_s = self._rows.waits_since_s(message.batch_id, now_s)
            self.ledger.submitted(message.batch_id, len(message.rows), since_s, message.deadline_s)
            self.core.handle(message)
            if self._planner is not None:
                self._planner.submitted(message, now_s)
        if self._planner is not None and (plan := self._planner.take_ready(now_s)) is not None:
            self.core.handle(plan)

    def _add_online(self, request_id: str, request: TraceRequest) -> None:
        limit = self._scenario.output_limit(request)
        self._outputs[request_id] = min(request.output_tokens, limit)
        self.measures.arrived(request_id, request.arrival_s)
        self.core.handle(
            AddRequest(
                request_id,
                token_ids(request.segments, PROMPT_VOCABULARY).tolist(),
                SamplingParams(max_tokens=limit),
                Tier.DEFAULT,
                request.arrival_s,
                self._scenario.ttft_slo_s,
                self._scenario.tpot_slo_s,
            )
        )

    def check_pool(self, now_s: float) -> None:
        """Checks, after planning, whether offline work is missing: a slot is free and no row is left for it."""
        if self.dry_s is not None or not self._scenario.offline or self._rows.may_be_empty:
            return
        queues = self.core.scheduler.queues
        if now_s >= self._dry_from_s and queues.num_running < self._scenario.max_num_seqs and not len(queues.pool):
            self.dry_s = now_s

    def _take_in(self, outputs: StepOutputs) -> None:
        now_s = self._clock.now()
        self.online_prefill_tokens += sum(stats.online_prefill_tokens for stats in outputs.stats)
        for output in outputs.outputs:
            if output.finish_reason is not None and output.request_id.startswith(ONLINE_PREFIX):
                self.online_ends_s.append(now_s)
        for output in self.measures.step(outputs, self._tally, self._swapped_blocks, now_s):
            self._row_ended(output, now_s)

    def _row_ended(self, output: RequestOutput, now_s: float) -> None:
        self.ledger.ended(output.request_id, now_s)
        if self._planner is not None:
            self._planner.ended(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            self.num_failed += 1
        else:
            self.measures.offline_ended(now_s)
        self._rows.row_ended(output.request_id, now_s)
        if self._rows.first_generation_done and self.makespan_s is None:
            self.makespan_s = now_s

    def _wait_for_change(self, until_s: float) -> None:
        now_s, change_s = self._clock.now(), min(self._next_change_s, until_s)
        if now_s - self._blocked_since_s > MAX_BLOCKED_S and change_s == math.inf:
            queues = self.core.scheduler.queues
            waiting = f"{len(queues.waiting_online)} online and {len(queues.pool)} offline requests waiting"
            raise SimulationError(
                f"policy {self._scenario.policy} has run no request for {MAX_BLOCKED_S:.0f} s at {now_s:.3f} s with "
                f"{queues.num_running} running, {waiting}"
            )
        self._clock.sleep_until(min(now_s + BLOCKED_WAIT_S, change_s))

    # ---- for the executor and the observers ----

    def _output_tokens(self, request_id: str) -> int:
        if request_id.startswith(OFFLINE_PREFIX):
            return self._rows.output_tokens(request_id)
        return self._outputs[request_id]

    def _reached_before(self, request_id: str) -> int:
        return self._rows.reached_tokens(request_id) if request_id.startswith(OFFLINE_PREFIX) else 0

    def charge_planning(self) -> None:
        """Advances the clock by the time of planning."""
        num_running = self.core.scheduler.queues.num_running
        self._clock.sleep_until(self._clock.now() + self._scenario.planning_s(num_running))

    def step_done(self, step: Step, result: StepResult) -> None:
        self._tally = self._executor.tallies.pop(step.plan.step)
        self._swapped_blocks = step.plan.shape.swapped_blocks + step.plan.shape.copied_aside_blocks

    def row_started(self, request_id: str, now_s: float) -> None:
        if self.ledger.has_started(request_id):  # in a step that was aborted
            return
        self.measures.offline_started(self.ledger.started(request_id, now_s))
        if self._planner is not None:
            self._planner.started(request_id)
