"""The simulator: the real engine core on a virtual clock, fed from traces. There is no second scheduler.

Online requests reach the core between steps, once the clock has reached their arrival, as in the real loop. Without
work the clock jumps to the next arrival. docs/simulation.md says what is simulated and what is not.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from neaptide.engine.observer import EngineObserver
from neaptide.engine.record.step_log import create_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.loadgen.workloads.sharing import prefix_sharing
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation import result as sim_result
from neaptide.simulation.bound import ONE_DEVICE, Devices, TargetsKept, bound_tokens_per_s
from neaptide.simulation.measures import CLOCK_ERROR_S, Measures, Window
from neaptide.simulation.offline_feed import OfflineFeed
from neaptide.simulation.replica import ONLINE_PREFIX, SimulatedReplica
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario

CUT_SHARE = 0.1
"""Fraction cut off at both ends of a run without online work."""
PROGRESS_STEPS = 200
LOW_WATER_SEATS = 4
"""The pool is refilled when it holds fewer rows than this many times the engine's slots."""

OnProgress = Callable[[float, float], None]
"""Called occasionally with a position and its end: seconds, or requests in a run without online work."""


@dataclass(slots=True)
class Run:
    """A finished simulation."""

    result: SimResult
    measures: Measures
    """The data of the result: times of every online request, columns of every step."""
    window_s: Window
    num_left_out: int
    """Requests whose prompt leaves no room in the context; never submitted, and counted nowhere else."""
    num_cut: int
    """Requests whose answer is truncated by ``max_tokens``; for offline work, in the sets as submitted."""
    num_unfinished: int
    """Online requests that did not end; they count as missed."""
    num_failed: int
    """Offline rows that failed in the engine, which indicates a bug in a policy."""
    dry_s: float | None
    """Time when the offline pool first ran out of work inside the window."""
    num_aborted: int = 0
    """Steps aborted for an online request."""


def simulate(
    scenario: Scenario,
    *,
    step_log: Path | None = None,
    observers: Sequence[EngineObserver] = (),
    on_progress: OnProgress | None = None,
    least_attainment: float = 0.0,
) -> Run:
    """Runs the scenario to its end.

    With online work, that is when it is finished. Otherwise the first generation of the offline sets must be done, or
    as many rows as two generations have, if the policy leaves some for last.

    Raises:
        ValueError: there is nothing to simulate, no online request fits, or offline sets cannot be combined or
            refilled.
        SimulationError: the policy makes no progress.
        OutOfReach: fewer than ``least_attainment`` of all online requests can still meet both targets.
        OSError: the step log or a token file cannot be written.
    """
    if not scenario.online and not scenario.offline:
        raise ValueError("neither online nor offline work to simulate: add some with --online or --offline")
    with TemporaryDirectory(prefix="neaptide-simulate-") as directory:
        return _Simulation(scenario, Path(directory), step_log, observers, on_progress, least_attainment).run()


class _Simulation:
    def __init__(
        self,
        scenario: Scenario,
        directory: Path,
        step_log: Path | None,
        observers: Sequence[EngineObserver],
        on_progress: OnProgress | None,
        least_attainment: float,
    ) -> None:
        self._started_s = time.perf_counter()
        self._scenario = scenario
        self._on_progress = on_progress
        self._online = fitting_online(scenario)
        self._next_online = 0
        self._most_missed = len(self._online) - math.ceil(least_attainment * len(self._online) - 1e-9)
        self._feed = offline_feed(scenario, directory)
        self._recorder = None
        if step_log is not None:
            # The file comes last: a scenario that is refused leaves none.
            config, recipe = scenario.engine_config(), scenario.recipe()
            self._recorder = StepRecorder(create_log(step_log), config, scenario.num_blocks, recipe)
        watching = [*([self._recorder] if self._recorder else []), *observers]
        self._replica = SimulatedReplica(scenario, self._feed, watching, dry_from_s=dry_from_s(scenario, self._online))

    def run(self) -> Run:
        try:
            self._loop()
        finally:
            if self._recorder is not None:
                self._recorder.close()
        if self._recorder is not None and self._recorder.failed:
            raise OSError("the step log could not be written")
        return self._reduce()

    def _loop(self) -> None:
        replica = self._replica
        while not self._is_over():
            while self._next_arrival_s <= replica.now_s:
                replica.send(f"{ONLINE_PREFIX}{self._next_online}", self._online[self._next_online])
                self._next_online += 1
            if not replica.turn(self._next_arrival_s):
                return
            if replica.measures.num_steps % PROGRESS_STEPS == 0:
                if self._most_missed < len(self._online):
                    replica.measures.check_reach(replica.now_s, self._scenario.ttft_slo_s, self._most_missed)
                self._show_progress()

    @property
    def _next_arrival_s(self) -> float:
        return self._online[self._next_online].arrival_s if self._next_online < len(self._online) else math.inf

    def _is_over(self) -> bool:
        given_s, feed, now_s = self._scenario.window_s, self._feed, self._replica.now_s
        if given_s is not None and now_s < given_s[1]:
            return False
        if not self._online:
            is_done = feed.first_generation_done or feed.num_ended >= 2 * feed.first_generation_size
            return is_done or given_s is not None
        if self._next_online < len(self._online):
            return False
        return not self._replica.has_online or now_s > self._online[-1].arrival_s + self._scenario.drain_s

    def _show_progress(self) -> None:
        if self._on_progress is None:
            return
        if self._online:
            done, total = self._replica.now_s, self._online[-1].arrival_s
        else:
            done, total = self._feed.num_ended, self._feed.first_generation_size
        self._on_progress(min(done, total), total)

    def _reduce(self) -> Run:
        scenario, replica = self._scenario, self._replica
        window_s = measured_window_s(scenario, self._online, replica.makespan_s or replica.now_s)
        dry_s = replica.dry_s if replica.dry_s is not None and replica.dry_s <= window_s[1] else None
        result = reduced(
            scenario,
            replica.measures,
            window_s,
            RunEnds(
                end_s=replica.now_s,
                makespan_s=replica.makespan_s,
                longest_wait_s=longest_wait_s(replica, replica.now_s),
                deadline_misses=replica.ledger.misses(replica.now_s),
                is_valid=dry_s is None,
            ),
            replica.plan_s,
            time.perf_counter() - self._started_s,
        )
        left_out = len(scenario.online) - len(self._online) + self._feed.num_left_out
        cut = self._feed.num_cut + num_cut(scenario, self._online)
        unfinished = sum(not record.is_done for record in replica.measures.online.values())
        counts = (left_out, cut, unfinished, replica.num_failed)
        return Run(result, replica.measures, window_s, *counts, dry_s, replica.num_aborted)


# ---- what simulations of one engine and of several have in common ----


@dataclass(slots=True, frozen=True)
class RunEnds:
    """End of a run, apart from the measurements of its steps and online requests."""

    end_s: float
    makespan_s: float | None
    longest_wait_s: float | None
    deadline_misses: int
    is_valid: bool


def fitting_online(scenario: Scenario) -> list[TraceRequest]:
    """The requests whose prompt leaves room for an answer. Raises ValueError if there are requests but none fits."""
    online = [r for r in scenario.online if r.segments and scenario.output_limit(r) > 0]
    if scenario.online and not online:
        raise ValueError(f"no online request and its answer fit into a context of {scenario.max_tokens} tokens")
    return online


def num_cut(scenario: Scenario, requests: Sequence[TraceRequest]) -> int:
    return sum(request.output_tokens > scenario.output_limit(request) for request in requests)


def offline_feed(scenario: Scenario, directory: Path) -> OfflineFeed:
    """The feed of the scenario's offline work."""
    return OfflineFeed(
        scenario.offline,
        directory,
        output_limit=scenario.output_limit,
        seed=scenario.seed,
        keep_order=scenario.keep_order,
        refill=scenario.refill,
        low_water=LOW_WATER_SEATS * scenario.max_num_seqs,
        deadline_s=scenario.offline_deadline_s,
    )


def dry_from_s(scenario: Scenario, online: Sequence[TraceRequest]) -> float:
    """Time from which on an empty pool counts as out of work."""
    if scenario.window_s is not None:
        return scenario.window_s[0]
    return online[0].arrival_s if online else 0.0


def measured_window_s(scenario: Scenario, online: Sequence[TraceRequest], end_s: float) -> Window:
    """The measured window. ``end_s`` is the end of the measured work in a run without online work."""
    if scenario.window_s is not None:
        return scenario.window_s
    if online:
        return online[0].arrival_s, online[-1].arrival_s
    return CUT_SHARE * end_s, (1.0 - CUT_SHARE) * end_s


def longest_wait_s(replica: SimulatedReplica, end_s: float) -> float | None:
    """Longest wait of a row; rows that never started have waited until the end of the run."""
    if not replica.ledger.has_jobs:
        return None
    return max(replica.measures.longest_offline_wait_s, replica.ledger.longest_wait_s(end_s))


def reduced(
    scenario: Scenario,
    measures: Measures,
    window_s: Window,
    ends: RunEnds,
    plan_s: Sequence[float],
    wall_s: float,
    devices: Devices = ONE_DEVICE,
) -> SimResult:
    """The numbers of a run."""
    slos_s = (scenario.ttft_slo_s, scenario.tpot_slo_s)
    return SimResult(
        valid=ends.is_valid,
        policy=scenario.policy,
        profile=scenario.profile.name,
        seed=scenario.seed,
        settings=scenario.settings(),
        steps=measures.num_steps,
        online=sim_result.online_result(measures, window_s, ends.end_s, slos_s),
        offline=sim_result.offline_result(
            measures,
            window_s,
            ends.makespan_s,
            ends.longest_wait_s,
            ends.deadline_misses,
            bound_tokens_per_s(scenario, window_s, devices, _kept(scenario, measures)),
        ),
        kv=sim_result.kv_result(measures, window_s, _sharing_bound(scenario)),
        preemptions=sim_result.preemption_result(measures),
        wasted_tokens=sim_result.wasted_tokens(measures),
        scheduler_ms=sim_result.scheduler_ms(plan_s),
        prediction=sim_result.prediction_result(measures, window_s),
        peak_memory_bytes=sim_result.peak_memory_bytes(),
        wall_s=wall_s,
    )


def _kept(scenario: Scenario, measures: Measures) -> list[TargetsKept]:
    """What the run kept of each online request that fits."""
    ttft_s, tpot_s = scenario.ttft_slo_s, scenario.tpot_slo_s
    found: list[TargetsKept] = []
    for number in range(len(fitting_online(scenario))):
        one = measures.online.get(f"{ONLINE_PREFIX}{number}")
        if one is None or not (one.is_done and one.began_in_time(ttft_s) and one.kept_pace(tpot_s)):
            found.append("nothing")
        else:
            found.append("every token" if one.lag_s <= ttft_s + CLOCK_ERROR_S else "both targets")
    return found


def _sharing_bound(scenario: Scenario) -> float | None:
    if not scenario.offline or not scenario.with_bounds:
        return None
    prompts = (request.segments for one in scenario.offline for request in one.requests)
    return prefix_sharing(prompts, scenario.block_size).ratio
