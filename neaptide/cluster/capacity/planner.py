"""The capacity planner (Echo, section 5.4).

Nothing is extrapolated from a formula: every size that is spoken of was simulated. docs/simulate-plan-loadtest.md says
how to read the answer.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from neaptide.cluster.capacity.measure import TARGETS, MeasuredSize, Size, measure
from neaptide.cluster.capacity.result import Beside, OfflinePlan, Peak, Plan, Point
from neaptide.cluster.capacity.search import smallest
from neaptide.cluster.capacity.stretch import Stretch, busiest, cut, samples, works_s
from neaptide.durations import DAY_S
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress

WHOLE_SAMPLES = 4
"""Number of samples of a trace that is longer than as many peaks. So a long trace takes no longer to simulate."""
LEAST_ROWS = 2048
"""A smaller pool of batch work is repeated until it has as many rows. A pool of a few rows would be refilled at every
step, which takes most of a simulation."""
KV_STEPS = 64
"""Resolution of the search for KV memory: equal parts of the profile's memory."""
GIB = 1 << 30

Watch = Callable[[str], AbstractContextManager[OnProgress | None]]
"""Entered for every simulated size, with its name."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Question:
    """The targets to meet, and what may vary."""

    base: Scenario
    """Device, policy, targets and limits; its loads are ignored."""
    policy: str = ""
    """The policy with its limits, as the plan names it; empty: the base's policy."""
    trace: Sequence[TraceRequest]
    """In the order of arrival, each within the context (see ``within_context``)."""
    offline: Sequence[OfflineSet] = ()
    find: Literal["replicas", "kv"] = "replicas"
    attainment: float = 0.9
    """Smallest fraction of the peak's requests that must meet both targets."""
    peak_s: float = 300.0
    margin_s: float = 30.0
    """Simulated on both sides of the peak, but not counted. Before a whole trace it has offline work only."""
    replicas: int = 1
    """Number of replicas when searching for KV memory."""
    max_replicas: int = 64
    price_per_hour: float | None = None
    """Price of one replica."""
    offline_at_every_size: bool = False
    """Simulate offline work in the peak for every size, for a plot; otherwise only for the answer."""


@dataclass(slots=True, frozen=True)
class Trace:
    requests: list[TraceRequest]
    num_left_out: int
    num_cut: int


def within_context(requests: Sequence[TraceRequest], scenario: Scenario) -> Trace:
    """The requests that the model can serve, with outputs cut to their limits.

    So requests missed for lack of memory are not mixed with those that no memory could serve.
    """
    kept, num_cut = [], 0
    for request in requests:
        room = scenario.max_model_len - request.input_tokens
        limit = room if scenario.max_output_tokens is None else min(room, scenario.max_output_tokens)
        if request.segments and room > 0:
            num_cut += request.output_tokens > limit
            kept.append(replace(request, output_tokens=min(request.output_tokens, limit)))
    return Trace(kept, len(requests) - len(kept), num_cut)


def plan(question: Question, watch: Watch = lambda name: nullcontext()) -> Plan:
    """Answers the question.

    Raises:
        ValueError: offline work is requested in a peak of length zero, or a scenario cannot be simulated.
        SimulationError: the policy makes no progress.
    """
    return _Planner(question, watch).plan()


class _Planner:
    def __init__(self, question: Question, watch: Watch) -> None:
        self._question = question
        self._watch = watch
        base, trace = question.base, question.trace
        work_s = works_s(trace, base.profile, base.overlap_kappa, base.block_size)
        span_s = busiest(trace, work_s, question.peak_s)
        self._peak = cut(trace, span_s, question.margin_s)
        self._work_s = sum(
            each for request, each in zip(trace, work_s, strict=True) if span_s[0] <= request.arrival_s <= span_s[1]
        )
        if question.offline and not self._peak.length_s > 0:
            raise ValueError("all requests of the peak arrive at once, so there is no offline rate: use a longer peak")
        self._rows = [_enough(one) for one in question.offline] if base.refill else question.offline
        """The offline sets, large enough to be refilled seldom."""
        self._tried: dict[int, Point] = {}

    def plan(self) -> Plan:
        question, peak = self._question, self._peak
        found = smallest(lambda number: self._point(number).holds, self._guess(), self._most)
        if found and found < self._most and found + 1 not in self._tried:
            self._point(found + 1)
        for number in self._sizes_with_offline(found):
            self._tried[number].beside = self._beside(peak, number, "the peak")
        tried = [self._tried[number] for number in sorted(self._tried)]
        holds = [point.holds for point in tried]
        return Plan(
            profile=question.base.profile.name,
            policy=question.policy or question.base.policy,
            finds_memory=question.find == "kv",
            devices=question.base.profile.tensor_parallel,
            price_per_hour=question.price_per_hour,
            peak=Peak(start_s=peak.start_s, end_s=peak.end_s, requests=peak.num_inside, work_s=self._work_s),
            tried=tried,
            answer=self._tried[found] if found else None,
            one_smaller=self._tried.get(found - 1) if found else None,
            is_monotone=holds == sorted(holds),
            offline=self._offline(found) if found else None,
        )

    def _sizes_with_offline(self, found: int | None) -> list[int]:
        if self._question.offline and self._question.offline_at_every_size:
            return sorted(self._tried)
        return [found] if self._question.offline and found else []

    # ---- sizes, by number ----

    @property
    def _most(self) -> int:
        question = self._question
        if question.find == "kv":
            return min(KV_STEPS, question.base.profile.num_blocks)
        return min(question.max_replicas, len(self._peak.requests))

    def _guess(self) -> int:
        if self._question.find == "kv":
            return self._most // 8  # most of the memory is seldom needed
        return math.ceil(self._work_s / self._question.peak_s)

    def _size(self, number: int) -> Size:
        num_blocks = self._question.base.profile.num_blocks
        if self._question.find == "kv":
            return Size(self._question.replicas, num_blocks * number // self._most)
        return Size(number, num_blocks)

    def _kv_gib(self, size: Size) -> float:
        profile = self._question.base.profile
        return size.num_blocks * profile.block_size * profile.kv_bytes_per_token / GIB

    def _name(self, size: Size) -> str:
        replicas = f"{size.replicas} replica{'s' if size.replicas > 1 else ''}"
        memory = f" of {self._kv_gib(size):.2f} GiB" if self._question.find == "kv" else ""
        return f"{self._question.base.profile.name}, {replicas}{memory}"

    # ---- what is simulated ----

    def _point(self, number: int) -> Point:
        size = self._size(number)
        with self._watch(f"{self._name(size)}: the peak") as on_progress:
            measured = measure(self._question.base, self._peak, size, on_progress=on_progress)
        self._tried[number] = point = Point(
            replicas=size.replicas,
            kv_blocks=size.num_blocks,
            kv_gib=self._kv_gib(size),
            attainment=measured.attainment,
            too_large=measured.too_large,
            holds=self._holds(measured),
        )
        return point

    def _holds(self, measured: MeasuredSize) -> bool:
        return measured.attainment["both"] >= self._question.attainment

    def _beside(self, stretch: Stretch, number: int, name: str) -> Beside:
        size, question = self._size(number), self._question
        with self._watch(f"{self._name(size)}: {name}, with offline work") as on_progress:
            measured = measure(question.base, stretch, size, self._rows, on_progress)
        return Beside(
            start_s=stretch.start_s,
            end_s=stretch.end_s,
            tokens_per_s=measured.offline_tokens_per_s,
            attainment=measured.attainment,
            holds=self._holds(measured),
            valid=measured.valid,
        )

    def _alone(self, number: int) -> float:
        """Offline tokens/s of one replica without online work, in as long a time as the peak's."""
        question, size = self._question, replace(self._size(number), replicas=1)
        nothing = Stretch([], (question.margin_s, question.margin_s + self._peak.length_s), 0.0)
        with self._watch(f"{self._name(size)}: offline work alone") as on_progress:
            return measure(question.base, nothing, size, self._rows, on_progress).offline_tokens_per_s

    def _whole(self, number: int) -> Beside:
        """The whole trace with offline work, or the mean of its samples."""
        question = self._question
        parts = samples(question.trace, question.peak_s, WHOLE_SAMPLES, question.margin_s)
        if len(parts) == 1:
            return self._beside(parts[0], number, "the whole trace")
        names = [f"sample {k} of {len(parts)} of the whole trace" for k in range(1, len(parts) + 1)]
        found = [self._beside(part, number, name) for part, name in zip(parts, names, strict=True)]
        inside = [part.num_inside for part in parts]
        attainment = {name: float(np.average([each.attainment[name] for each in found], 0, inside)) for name in TARGETS}
        return Beside(
            start_s=question.trace[0].arrival_s,
            end_s=question.trace[-1].arrival_s,
            tokens_per_s=sum(each.tokens_per_s for each in found) / len(found),
            attainment=attainment,
            holds=attainment["both"] >= question.attainment,
            valid=all(each.valid for each in found),
            samples=len(found),
        )

    def _offline(self, number: int) -> OfflinePlan | None:
        question, at_peak = self._question, self._tried[number].beside
        if at_peak is None:
            return None
        whole = at_peak
        if self._peak.num_inside < len(question.trace):
            whole = self._whole(number)
        scenario = self._size(number).of(question.base)
        limits = [(row, scenario.output_limit(row)) for one in question.offline for row in one.requests]
        rows = [row.input_tokens + min(row.output_tokens, limit) for row, limit in limits if row.segments and limit > 0]
        rates = sorted((whole.tokens_per_s, at_peak.tokens_per_s), reverse=True)
        low_s, high_s = (sum(rows) / rate if rate else None for rate in rates)
        return OfflinePlan(
            rows=len(rows),
            tokens=sum(rows),
            whole=whole,
            tokens_per_day=DAY_S * whole.tokens_per_s,
            alone_tokens_per_s=self._alone(number),
            finish_s=(low_s, high_s),
        )


def _enough(one: OfflineSet) -> OfflineSet:
    """The set with at least ``LEAST_ROWS`` rows, unless its submissions are given."""
    arrives = any(request.arrival_s > 0 for request in one.requests)
    return one if one.is_job or one.batch_size is not None or arrives else one.enlarged(LEAST_ROWS)
