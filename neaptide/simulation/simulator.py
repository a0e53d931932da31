"""The simulator: the real engine core on a virtual clock, fed from traces. There is no second scheduler here.

Online requests are handed to the core once the clock has reached their arrival, between steps, as the real loop drains
its messages; when there is no work the clock jumps to the next arrival. docs/simulation.md says what is simulated and
what is not.
"""

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from neaptide.engine.clock import VirtualClock
from neaptide.engine.core import EngineCore
from neaptide.engine.messages import AddRequest, RequestOutput, StepOutputs
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.engine.record.step_log import create_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.recipes import build_cost_model, build_headroom
from neaptide.executors.simulated.trace_executor import END_TOKEN_ID, PROMPT_VOCABULARY, StepTally, TraceExecutor
from neaptide.loadgen.workloads.sharing import prefix_sharing
from neaptide.loadgen.workloads.traces import token_ids
from neaptide.simulation import result as sim_result
from neaptide.simulation.bound import bound_tokens_per_s
from neaptide.simulation.measures import Copied, Measures, Window
from neaptide.simulation.offline_feed import OFFLINE_PREFIX, OfflineFeed
from neaptide.simulation.pools.inline_planner import InlinePlanner
from neaptide.simulation.pools.ledger import RowLedger
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario

ONLINE_PREFIX = "online-"
BLOCKED_WAIT_S = 0.005
"""As the real loop: after planning that found no request that can run."""
MAX_BLOCKED_S = 60.0
"""A policy that runs no request for so long although there is work stands still for good."""
CUT_SHARE = 0.1
"""Of a run without online work, cut off at both ends."""
PROGRESS_STEPS = 200
LOW_WATER_SEATS = 4
"""A pool is refilled while it could still fill the engine's seats so often."""

OnProgress = Callable[[float, float], None]
"""Called now and then with a position and where it ends: seconds, or requests of a run without online work."""


class SimulationError(RuntimeError):
    """The engine stands still."""


@dataclass(slots=True)
class Run:
    """A simulation that is over."""

    result: SimResult
    measures: Measures
    """Behind the result: times of every online request, columns of every step."""
    window_s: Window
    num_left_out: int
    """Requests whose prompt leaves no room in the context: never submitted, and counted nowhere else."""
    num_cut: int
    """Requests whose answer ends at their ``max_tokens``, for it is longer; offline, of the sets as submitted."""
    num_unfinished: int
    """Online requests without an end; they count as missed."""
    num_failed: int
    """Offline rows that the engine gave up: a bug in a policy."""
    dry_s: float | None
    """When the offline pool first ran dry inside the window."""


def simulate(
    scenario: Scenario,
    *,
    step_log: Path | None = None,
    observers: Sequence[EngineObserver] = (),
    on_progress: OnProgress | None = None,
) -> Run:
    """Runs the scenario to its end: with online work until that is finished, else until the first generation of the
    offline sets is (or as many rows as two of them have, under a policy that leaves some for last).

    Raises:
        ValueError: nothing to simulate, no online request fits, or offline sets that do not go together or refill.
        SimulationError: the policy stands still.
        OSError: the step log or a token file cannot be written.
    """
    if not scenario.online and not scenario.offline:
        raise ValueError("neither online nor offline work to simulate")
    with TemporaryDirectory(prefix="neaptide-simulate-") as directory:
        return _Simulation(scenario, Path(directory), step_log, observers, on_progress).run()


class _Watch(EngineObserver):
    """Notes what every plan starts and leaves, and measures the wall time of planning, which enters no decision: on the
    virtual clock planning takes what the profile says, for the same run must come out everywhere."""

    def __init__(self, simulation: "_Simulation") -> None:
        self._simulation = simulation
        self._began_s = 0.0

    def planning(self, now_s: float) -> None:
        self._simulation.charge_planning()
        self._began_s = time.perf_counter()

    def idle(self, start_s: float, scheduler: Scheduler) -> None:
        self._simulation.check_pool(start_s)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self._simulation.plan_s.append(time.perf_counter() - self._began_s)
        for new in step.plan.new_requests:
            if new.request_id.startswith(OFFLINE_PREFIX):
                self._simulation.row_started(new.request_id, draft.now_s)
        self._simulation.check_pool(draft.now_s)

    def executed(self, step: Step, result: StepResult) -> None:
        self._simulation.step_done(step, result)


class _Simulation:
    def __init__(
        self,
        scenario: Scenario,
        directory: Path,
        step_log: Path | None,
        observers: Sequence[EngineObserver],
        on_progress: OnProgress | None,
    ) -> None:
        self._started_s = time.perf_counter()
        self._scenario = scenario
        self._clock = VirtualClock()
        self._measures = Measures(scenario.tpot_slo_s)
        self._on_progress = on_progress
        self.plan_s = array("d")
        self._online = [r for r in scenario.online if r.segments and scenario.output_limit(r) > 0]
        if scenario.online and not self._online:
            raise ValueError(f"no online request and its answer fit into a context of {scenario.max_tokens} tokens")
        self._next_online = 0
        self._feed = OfflineFeed(
            scenario.offline,
            directory,
            output_limit=scenario.output_limit,
            seed=scenario.seed,
            keep_order=scenario.keep_order,
            refill=scenario.refill,
            low_water=LOW_WATER_SEATS * scenario.max_num_seqs,
            deadline_s=scenario.offline_deadline_s,
        )
        self._rows = RowLedger(scenario.offline_deadline_s)
        self._planner = None
        if (order := scenario.order) is not None:
            self._planner = InlinePlanner(
                order, scenario.profile, scenario.block_size, scenario.planning_scale, self._feed.output_tokens
            )
        self._makespan_s: float | None = None
        self._dry_s: float | None = None  # as ``Run.dry_s``
        self._num_failed = 0
        self._tally = StepTally()
        """Of the step that was done last ..."""
        self._copied = Copied()  # ... and what it copied
        config = scenario.engine_config()
        self._executor = self._build_executor()
        self._recorder = None
        if step_log is not None:
            self._recorder = StepRecorder(create_log(step_log), config, scenario.num_blocks, scenario.recipe())
        self._core = EngineCore(
            config,
            self._executor,
            build_cost_model(scenario.recipe()["cost_model"]),
            build_headroom(scenario.headroom, scenario.num_blocks),
            self._clock,
            frozenset({END_TOKEN_ID}),
            observers=[_Watch(self), *([self._recorder] if self._recorder else []), *observers],
        )

    def _build_executor(self) -> TraceExecutor:
        scenario = self._scenario
        return TraceExecutor(
            scenario.num_blocks,
            scenario.truth or RooflineModel.from_profile(scenario.profile, scenario.overlap_kappa),
            self._clock,
            self._output_tokens,
            lambda request_id: request_id.startswith(ONLINE_PREFIX),
            scenario.step_noise,
            scenario.seed,
        )

    def run(self) -> Run:
        try:
            self._loop()
        finally:
            if self._recorder is not None:
                self._recorder.close()
        if self._recorder is not None and self._recorder.failed:
            raise OSError("the step log could not be written")
        return self._reduce()

    # ---- the loop ----

    def _loop(self) -> None:
        core, clock = self._core, self._clock
        blocked_since_s = math.inf
        while not self._is_over():
            self._hand_in()
            if not core.has_work:
                self.check_pool(clock.now())
                if self._next_change_s() == math.inf:
                    return
                clock.sleep_until(self._next_change_s())
                continue
            if core.plan_at_s > clock.now():
                clock.sleep_until(min(core.plan_at_s, self._next_change_s()))
                continue
            outputs = core.step()
            self._take_in(outputs)
            if outputs.stats or core.has_step_in_flight:
                blocked_since_s = math.inf
            else:
                blocked_since_s = min(blocked_since_s, clock.now())
                self._wait_for_change(blocked_since_s)

    def _is_over(self) -> bool:
        given_s, feed = self._scenario.window_s, self._feed
        if given_s is not None and self._clock.now() < given_s[1]:
            return False
        if not self._online:
            is_done = feed.first_generation_done or feed.num_ended >= 2 * feed.first_generation_size
            return is_done or given_s is not None
        if self._next_online < len(self._online):
            return False
        queues = self._core.scheduler.queues
        has_online = bool(queues.running_online or queues.waiting_online)
        return not has_online or self._clock.now() > self._online[-1].arrival_s + self._scenario.drain_s

    @property
    def _next_arrival_s(self) -> float:
        return self._online[self._next_online].arrival_s if self._next_online < len(self._online) else math.inf

    def _next_change_s(self) -> float:
        ready_s = self._planner.ready_s if self._planner is not None else math.inf
        return min(self._next_arrival_s, self._feed.next_arrival_s, ready_s)

    def _hand_in(self) -> None:
        now_s = self._clock.now()
        while self._next_arrival_s <= now_s:
            request = self._online[self._next_online]
            request_id = f"{ONLINE_PREFIX}{self._next_online}"
            self._next_online += 1
            self._measures.arrived(request_id, request.arrival_s)
            self._core.handle(
                AddRequest(
                    request_id,
                    token_ids(request.segments, PROMPT_VOCABULARY).tolist(),
                    SamplingParams(max_tokens=self._scenario.output_limit(request)),
                    Tier.DEFAULT,
                    request.arrival_s,
                    self._scenario.ttft_slo_s,
                    self._scenario.tpot_slo_s,
                )
            )
        pool = self._core.scheduler.queues.pool
        for message in self._feed.messages(len(pool), now_s):
            self._rows.submitted(message.batch_id, len(message.rows), now_s)
            self._core.handle(message)
            if self._planner is not None:
                self._planner.submitted(message, now_s)
        if self._planner is not None and (plan := self._planner.take_ready(now_s)) is not None:
            self._core.handle(plan)

    def check_pool(self, now_s: float) -> None:
        """After planning: with a seat free and no row left to take it, offline work is missing."""
        if self._dry_s is not None or not self._scenario.offline or self._feed.batch_size or self._feed.arrives:
            return
        queues = self._core.scheduler.queues
        if now_s >= self._window_s()[0] and queues.num_running < self._scenario.max_num_seqs and not len(queues.pool):
            self._dry_s = now_s

    def _take_in(self, outputs: StepOutputs) -> None:
        now_s = self._clock.now()
        for output in self._measures.step(outputs, self._tally, self._copied, now_s):
            self._row_ended(output, now_s)
        if self._on_progress is not None and self._measures.num_steps % PROGRESS_STEPS == 0:
            if self._online:
                self._on_progress(now_s, self._online[-1].arrival_s)
            else:
                self._on_progress(self._feed.num_ended, self._feed.first_generation_size)

    def _row_ended(self, output: RequestOutput, now_s: float) -> None:
        self._rows.ended(output.request_id, now_s)
        if self._planner is not None:
            self._planner.started(output.request_id)
        if output.finish_reason is FinishReason.ERROR:
            self._num_failed += 1
        else:
            self._measures.offline_ended(now_s)
        self._feed.row_ended(output.request_id)
        if self._feed.first_generation_done and self._makespan_s is None:
            self._makespan_s = now_s

    def _wait_for_change(self, blocked_since_s: float) -> None:
        now_s = self._clock.now()
        if now_s - blocked_since_s > MAX_BLOCKED_S and self._next_change_s() == math.inf:
            queues = self._core.scheduler.queues
            waiting = f"{len(queues.waiting_online)} online and {len(queues.pool)} offline requests waiting"
            raise SimulationError(
                f"policy {self._scenario.policy} has run no request for {MAX_BLOCKED_S:.0f} s at {now_s:.3f} s with "
                f"{queues.num_running} running, {waiting}"
            )
        self._clock.sleep_until(min(now_s + BLOCKED_WAIT_S, self._next_change_s()))

    def _output_tokens(self, request_id: str) -> int:
        if request_id.startswith(OFFLINE_PREFIX):
            return self._feed.output_tokens(request_id)
        request = self._online[int(request_id[len(ONLINE_PREFIX) :])]
        return min(request.output_tokens, self._scenario.output_limit(request))

    def charge_planning(self) -> None:
        """The step's times begin before this and go on behind it, as on a clock that runs by itself."""
        num_running = self._core.scheduler.queues.num_running
        self._clock.sleep_until(self._clock.now() + self._scenario.planning_s(num_running))

    def step_done(self, step: Step, result: StepResult) -> None:
        self._tally = self._executor.tallies.pop(step.plan.step)
        self._copied = Copied.by(step.plan)

    def row_started(self, request_id: str, now_s: float) -> None:
        self._measures.offline_started(self._rows.started(request_id, now_s))
        if self._planner is not None:
            self._planner.started(request_id)

    # ---- the numbers ----

    def _window_s(self) -> Window:
        if self._scenario.window_s is not None:
            return self._scenario.window_s
        if self._online:
            return self._online[0].arrival_s, self._online[-1].arrival_s
        end_s = self._makespan_s or self._clock.now()
        return CUT_SHARE * end_s, (1.0 - CUT_SHARE) * end_s

    def _reduce(self) -> Run:
        scenario, measures, window_s = self._scenario, self._measures, self._window_s()
        end_s = self._clock.now()
        dry_s = self._dry_s if self._dry_s is not None and self._dry_s <= window_s[1] else None
        result = SimResult(
            valid=dry_s is None,
            policy=scenario.policy,
            profile=scenario.profile.name,
            seed=scenario.seed,
            settings=scenario.settings(),
            steps=measures.num_steps,
            online=sim_result.online_result(measures, window_s, end_s, (scenario.ttft_slo_s, scenario.tpot_slo_s)),
            offline=sim_result.offline_result(
                measures,
                window_s,
                self._makespan_s,
                self._longest_wait_s(end_s),
                self._rows.misses(end_s),
                bound_tokens_per_s(scenario, window_s),
            ),
            kv=sim_result.kv_result(measures, window_s, self._bound()),
            preemptions=sim_result.preemption_result(measures),
            wasted_tokens=sim_result.wasted_tokens(measures),
            scheduler_ms=sim_result.scheduler_ms(self.plan_s),
            prediction=sim_result.prediction_result(measures, window_s),
            peak_memory_bytes=sim_result.peak_memory_bytes(),
            wall_s=time.perf_counter() - self._started_s,
        )
        left_out = len(scenario.online) - len(self._online) + self._feed.num_left_out
        cut = self._feed.num_cut + sum(r.output_tokens > scenario.output_limit(r) for r in self._online)
        unfinished = sum(not record.is_done for record in measures.online.values())
        return Run(result, measures, window_s, left_out, cut, unfinished, self._num_failed, dry_s)

    def _longest_wait_s(self, end_s: float) -> float | None:
        """A row that never started has waited until the end of the run."""
        if not self._rows.has_jobs:
            return None
        return max(self._measures.longest_offline_wait_s, self._rows.longest_wait_s(end_s))

    def _bound(self) -> float | None:
        if not self._scenario.offline or not self._scenario.with_bounds:
            return None
        prompts = (request.segments for one in self._scenario.offline for request in one.requests)
        return prefix_sharing(prompts, self._scenario.block_size).ratio
