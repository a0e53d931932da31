"""Counterfactual replay: simulates the last minutes under other policies.

The load is the recorded one (``load``). Step times are those that the engine's cost model had learned at each moment,
with its recorded errors. A simulation begins with an empty cache, so some time before the window is simulated but not
counted. docs/operations.md explains the figures and their limits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.record.traffic import ServedRequest
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.steps.step import Step
from neaptide.simulation.measures import OnlineRecord, Window
from neaptide.simulation.recorded.load import LoadMaker
from neaptide.simulation.recorded.recording import StepTimes, TrafficRecording, num_sampled
from neaptide.simulation.replica import ONLINE_PREFIX
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate

DRAIN_S = 60.0
"""Time after the window for its requests to end."""
MORE_ROWS = 2.0
"""Rows are taken for this multiple of what a policy could compute, because it may find much of them in the cache."""


@dataclass(slots=True, frozen=True)
class ReplayFigures:
    """The figures of one window."""

    met: int
    """Online requests that met both targets; for running requests, only the first token's."""
    offline_tokens_per_s: float | None
    """Logical tokens. None if unknown."""


@dataclass(slots=True, frozen=True)
class Comparison:
    window_s: Window
    """On the engine's clock."""
    requests: int
    """Online requests that arrived in the window and are judged."""
    real: ReplayFigures
    shadows: dict[str, ReplayFigures]
    """By policy."""

    def attainment(self, figures: ReplayFigures) -> float | None:
        return figures.met / self.requests if self.requests else None


def compare(
    recording: TrafficRecording, policies: Sequence[str], warm_s: float, window_s: float, since_s: float = -math.inf
) -> Comparison | None:
    """Replays the last ``window_s`` seconds under these policies, after ``warm_s`` that are not counted.

    If less was recorded, the window is shorter. With less than half of it there is nothing to compare: None.

    Args:
        since_s: earlier records belong to another engine.
    """
    now_s = recording.now_s
    origin_s = max(now_s - window_s - warm_s, recording.first_s, recording.steady_s, since_s)
    if now_s - origin_s < warm_s + window_s / 2:
        return None
    return _Shadow(recording, origin_s, (origin_s + warm_s, now_s)).compare(policies)


class _Shadow:
    def __init__(self, recording: TrafficRecording, origin_s: float, window_s: Window) -> None:
        self._recording = recording
        self._origin_s = origin_s
        self._window_s = window_s
        self._recipes = recording.recipes(origin_s)
        self._profile = recording.profile((origin_s, window_s[1]))
        self._load = LoadMaker(recording, origin_s, self._max_tokens, self._row_tokens()).load()
        self._judged = [
            (number, one) for number, one in enumerate(self._load.served) if _is_judged(one, window_s, recording.now_s)
        ]

    @property
    def _max_tokens(self) -> int:
        return min(self._recording.present.scheduler.max_model_len, self._profile.kv_capacity_tokens)

    def _row_tokens(self) -> float:
        """More tokens than any policy can compute."""
        step_tokens = self._recording.present.scheduler.max_num_batched_tokens
        shape = BatchShape()
        shape.add(step_tokens, 0)
        step_s = StepTimes(self._recipes, self._origin_s).predict(shape).seconds
        seconds = self._window_s[1] - self._origin_s + DRAIN_S
        return MORE_ROWS * seconds * step_tokens / step_s + self._profile.kv_capacity_tokens

    def compare(self, policies: Sequence[str]) -> Comparison:
        met = sum(_met(_record(one), one) for _, one in self._judged)
        real = ReplayFigures(met, self._recording.offline_tokens_per_s(self._window_s))
        shadows = {policy: self._shadow(policy) for policy in policies}
        return Comparison(self._window_s, len(self._judged), real, shadows)

    def _shadow(self, policy: str) -> ReplayFigures:
        load = self._load
        if not load.online and not load.offline:
            return ReplayFigures(0, 0.0)
        errors = self._recording.errors(self._origin_s)
        times, pool = StepTimes(self._recipes, self._origin_s, errors), _PoolWatch()
        scenario = self._scenario(policy, times)
        run = simulate(scenario, observers=[times, pool])
        online = run.measures.online
        met = 0
        for number, one in self._judged:
            record = online.get(f"{ONLINE_PREFIX}{number}")
            met += record is not None and _met(record, one)
        is_dry = load.is_cut and pool.was_empty
        return ReplayFigures(met, None if is_dry else run.result.offline.tokens_per_s)

    def _scenario(self, policy: str, times: StepTimes) -> Scenario:
        scheduler, load, recording = self._recording.present.scheduler, self._load, self._recording
        window_s = self._window_s[0] - self._origin_s, self._window_s[1] - self._origin_s
        return Scenario(
            profile=self._profile,
            online=load.online,
            offline=load.offline,
            policy=policy,
            ttft_slo_s=scheduler.ttft_slo_s,
            tpot_slo_s=scheduler.tpot_slo_s,
            block_size=recording.present.block_size,
            keep_order=True,
            refill=False,
            window_s=window_s,
            drain_s=DRAIN_S,
            overlap_depth=scheduler.overlap_depth,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            truth=times,
            with_bounds=False,
        )


class _PoolWatch(EngineObserver):
    """Records whether the pool ever had no row left."""

    def __init__(self) -> None:
        self.was_empty = False

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self.was_empty |= not len(scheduler.queues.pool)


def _is_judged(one: ServedRequest, window_s: Window, now_s: float) -> bool:
    """Whether the request counts. A client that left does not; a running request counts once its first token is due."""
    if not window_s[0] <= one.arrival_s <= window_s[1] or not one.max_tokens:
        return False
    if one.reason is None:
        return now_s > one.arrival_s + one.ttft_slo_s
    return one.reason is not FinishReason.ABORT


def _record(one: ServedRequest) -> OnlineRecord:
    """The client's observation, as a record of the simulation."""
    is_done = one.reason in (FinishReason.STOP, FinishReason.LENGTH)
    return OnlineRecord(one.arrival_s, one.first_token_s or math.inf, one.ended_s, num_sampled(one), is_done)


def _met(record: OnlineRecord, one: ServedRequest) -> bool:
    """Whether the request met its own targets: both, or only the first token's while it is still running.

    The simulated runs use the same rule, because a running request's end is a guess. Skipping running requests until
    they miss would count the misses among long answers but not the hits.
    """
    if not record.began_in_time(one.ttft_slo_s):
        return False
    return one.reason is None or (record.is_done and record.kept_pace(one.tpot_slo_s))
