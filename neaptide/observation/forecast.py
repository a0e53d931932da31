"""Forecast of Neaptide beside recorded chats, by simulation on inferred step times."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from neaptide.cluster.capacity.planner import Question, plan
from neaptide.cluster.capacity.stretch import Stretch, busiest, cut, works_s
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.points import PolicyPoint
from neaptide.simulation.result import Percentiles, SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress, simulate

INSIDE, INSTEAD, ALONE, FCFS = "inside", "instead", "alone", "fcfs"
NOT_INSIDE = ("reuse-eviction",)
"""Parts of the policy that need our own KV cache manager."""
LEAST_TTFT_S = 1e-3
MARGIN_S = 30.0
"""Simulated before and after the part that counts."""
ROWS = 2048
Z = 1.645
"""Half of a 90% interval, in standard deviations."""
STUDENT = (math.inf, 6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83)
"""The same for few draws, by their number less one. From ten on ``Z``, slightly too small."""
PRIORITY_PARTS = ((1, 1), (1, 4), (4, 4), (16, 16))
"""By how much the slots and the step tokens of each tried setting of vLLM's priority are smaller."""
LEAST_STEP_TOKENS, LEAST_SLOTS = 64, 4

Watch = Callable[[str], AbstractContextManager[OnProgress | None]]


@dataclass(slots=True, frozen=True)
class Sample:
    """One possible truth behind a record: traffic, and a device with step times."""

    requests: Sequence[TraceRequest]
    profile: DeviceProfile


@dataclass(slots=True, frozen=True)
class ReplayedChats:
    """The chats of a record, simulated alone."""

    start_s: float
    """Start of the simulated part, in seconds since the first poll."""
    end_s: float
    mean_ttft_s: float | None
    """None if no chat got a token."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ForecastQuestion:
    """Subject of a forecast. Times are in seconds."""

    base: Scenario
    """Targets and limits; loads, profile and policy are ignored."""
    samples: Sequence[Sample]
    """The best guess first, then draws."""
    batch: OfflineSet
    overhead_s: float = 0.0
    """Time of a request outside of what is simulated. It comes before the first token."""
    error: float = 0.0
    """Relative error of mean step times."""
    simulate_s: float = 600.0
    """Longest part of the traffic that is simulated: its busiest."""
    attainment: float = 0.9
    """Share of the peak's chats that replicas must keep in time."""
    peak_s: float = 300.0
    max_replicas: int = 64


class Estimate(msgspec.Struct, frozen=True):
    """A value with its 90% interval."""

    value: float
    low: float
    high: float


class ForecastOption(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the chats, with batch work beside them unless it is ``alone``."""

    name: str
    """``inside``, ``instead``, ``alone``, ``fcfs``, or ``priority`` with its limits."""
    max_num_seqs: int
    max_num_batched_tokens: int
    attainment: Estimate
    """Share of the chats within both targets."""
    batch_tokens_per_s: Estimate
    ttft_s: Percentiles
    tpot_s: Percentiles
    mean_ttft_s: float | None
    mean_gap_s: float | None
    valid: bool
    """False if the batch ran out of lines."""


class ReplicasNeeded(msgspec.Struct, frozen=True, kw_only=True):
    """Number of replicas that the peak needs, with chats alone."""

    number: int | None
    """None: not even the most that were tried."""
    most: int
    """The most that may be tried."""
    least: float
    """Share of the chats that they must keep in time."""
    attainment: float
    peak_s: float
    peak_requests: int


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a ``ForecastQuestion``."""

    start_s: float
    """Start of the simulated part, in seconds since the first poll."""
    simulated_s: float
    chats: int
    draws: int
    overhead_s: float
    """Part of every TTFT that is not simulated."""
    options: list[ForecastOption]
    best_priority: str
    """Among the settings with as many chats in time as ours inside, within a point, the one with the most batch work;
    if there is none, the one with the most chats in time."""
    replicas: ReplicasNeeded

    def option(self, name: str) -> ForecastOption:
        return next(option for option in self.options if option.name == name)


def forecast(question: ForecastQuestion, watch: Watch = lambda name: nullcontext()) -> Forecast:
    """Simulates every option.

    Raises:
        ValueError: no request fits, or a scenario cannot be simulated.
        SimulationError: a policy makes no progress.
    """
    return _Forecaster(question, watch).answer()


def replayed_alone(question: ForecastQuestion, watch: Watch = lambda name: nullcontext()) -> ReplayedChats:
    """Simulates the best guess of the chats without batch work, and adds no overhead.

    Raises: as ``forecast`` does.
    """
    return _Forecaster(replace(question, samples=question.samples[:1], overhead_s=0.0), watch).replay()


def batch_like(requests: Sequence[TraceRequest], seed: int) -> OfflineSet:
    """Batch lines with the lengths of these requests, which share nothing."""
    rng = np.random.default_rng([content_base("batch like chats") >> 31, seed])
    picked = [requests[k] for k in rng.integers(len(requests), size=ROWS)]
    return batch_of("like the chats", [(one.input_tokens, one.output_tokens) for one in picked])


def batch_of(name: str, lengths: Sequence[tuple[int, int]]) -> OfflineSet:
    """Batch lines of prompt and answer tokens, which share nothing."""
    base = content_base(f"{name}#0")
    rows = [TraceRequest(0.0, ((base + k, prompt),), answer) for k, (prompt, answer) in enumerate(lengths)]
    return OfflineSet(name, rows, synthetic=True)


def priority_points(max_num_seqs: int, max_num_batched_tokens: int) -> list[PolicyPoint]:
    """The settings of vLLM's priority that are tried: the server's own, and smaller ones, which favour chats."""
    found = []
    for slots_part, tokens_part in PRIORITY_PARTS:
        slots = max(max_num_seqs // slots_part, min(LEAST_SLOTS, max_num_seqs))
        tokens = max(max_num_batched_tokens // tokens_part, min(LEAST_STEP_TOKENS, max_num_batched_tokens), slots)
        found.append(PolicyPoint("priority", tokens, slots))
    return list(dict.fromkeys(found))


class _Forecaster:
    def __init__(self, question: ForecastQuestion, watch: Watch) -> None:
        self._question = question
        self._watch = watch
        self._runs: dict[tuple[str, int], SimResult] = {}
        self._means: dict[str, tuple[float | None, float | None]] = {}
        self._parts = [self._part(sample) for sample in question.samples]

    def answer(self) -> Forecast:
        question, base = self._question, self._question.base
        points = priority_points(base.max_num_seqs, base.max_num_batched_tokens)
        scenarios: dict[str, Scenario] = {
            ALONE: replace(base, policy=FCFS),
            INSIDE: replace(base, left_out=NOT_INSIDE),
            INSTEAD: base,
            FCFS: replace(base, policy=FCFS),
        } | {str(point): point.of(base) for point in points}
        for name, scenario in scenarios.items():
            self._run(name, scenario, 0)
        best = self._best_priority([str(point) for point in points])
        repeated = (ALONE, INSIDE, INSTEAD, best)
        for name in repeated:
            for number in range(1, len(question.samples)):
                self._run(name, scenarios[name], number)
        return Forecast(
            start_s=self._parts[0].start_s,
            simulated_s=self._parts[0].length_s,
            chats=self._runs[ALONE, 0].online.requests,
            draws=len(question.samples) - 1,
            overhead_s=question.overhead_s,
            options=[self._option(name, scenario) for name, scenario in scenarios.items()],
            best_priority=best,
            replicas=self._replicas(),
        )

    def replay(self) -> ReplayedChats:
        self._run(ALONE, replace(self._question.base, policy=FCFS), 0)
        part = self._parts[0]
        return ReplayedChats(part.start_s, part.start_s + part.length_s, self._means[ALONE][0])

    def _part(self, sample: Sample) -> Stretch:
        """The traffic that is simulated, on a clock that begins with a margin of batch work alone."""
        question, requests = self._question, sample.requests
        span_s = requests[0].arrival_s, requests[-1].arrival_s
        if span_s[1] - span_s[0] > question.simulate_s:
            span_s = busiest(requests, self._work_s(sample), question.simulate_s)
        return cut(requests, span_s, min(MARGIN_S, question.simulate_s / 4))

    def _work_s(self, sample: Sample) -> list[float]:
        return list(works_s(sample.requests, sample.profile, 1.0, self._question.base.block_size))

    def _run(self, name: str, scenario: Scenario, number: int) -> None:
        question = self._question
        requests, window_s = self._parts[number].requests, self._parts[number].window_s
        longest = max(request.output_tokens for request in requests)
        target_s = max(scenario.ttft_slo_s - question.overhead_s, LEAST_TTFT_S)
        scenario = replace(
            scenario,
            profile=question.samples[number].profile,
            online=requests,
            offline=() if name == ALONE else (question.batch,),
            ttft_slo_s=target_s,
            window_s=window_s,
            drain_s=target_s + longest * scenario.tpot_slo_s,
            seed=scenario.seed + number,
            with_bounds=False,
        )
        said = name if number == 0 else f"{name}, draw {number}"
        with self._watch(f"simulating {said}") as on_progress:
            run = simulate(scenario, on_progress=on_progress)
        self._runs[name, number] = run.result
        if number == 0:
            records = [r for r in run.measures.online.values() if window_s[0] <= r.arrival_s <= window_s[1]]
            ttfts_s = [r.first_s - r.arrival_s for r in records if math.isfinite(r.first_s)]
            gaps_s = run.measures.itl_s
            self._means[name] = (
                float(np.mean(ttfts_s)) + question.overhead_s if ttfts_s else None,
                float(np.mean(gaps_s)) if len(gaps_s) else None,
            )

    def _best_priority(self, names: Sequence[str]) -> str:
        least = self._runs[INSIDE, 0].attained - 0.01
        good = [name for name in names if self._runs[name, 0].attained >= least]
        if good:
            return max(good, key=lambda name: self._runs[name, 0].offline_tokens_per_s)
        return max(names, key=lambda name: (self._runs[name, 0].attained, self._runs[name, 0].offline_tokens_per_s))

    def _option(self, name: str, scenario: Scenario) -> ForecastOption:
        found = [self._runs[name, k] for k in range(len(self._question.samples)) if (name, k) in self._runs]
        first = found[0]
        mean_ttft_s, mean_gap_s = self._means[name]
        return ForecastOption(
            name=name,
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            attainment=attainment_estimate([run.attained for run in found], first.online.requests),
            batch_tokens_per_s=rate_estimate([run.offline_tokens_per_s for run in found], self._question.error),
            ttft_s={k: None if v is None else v + self._question.overhead_s for k, v in first.online.ttft_s.items()},
            tpot_s=first.online.tpot_s,
            mean_ttft_s=mean_ttft_s,
            mean_gap_s=mean_gap_s,
            valid=all(run.valid for run in found),
        )

    def _replicas(self) -> ReplicasNeeded:
        question, sample = self._question, self._question.samples[0]
        length_s = sample.requests[-1].arrival_s - sample.requests[0].arrival_s
        target_s = max(question.base.ttft_slo_s - question.overhead_s, LEAST_TTFT_S)
        base = replace(question.base, profile=sample.profile, ttft_slo_s=target_s, with_bounds=False)
        asked = Question(
            base=base,
            trace=sample.requests,
            attainment=question.attainment,
            peak_s=min(question.peak_s, max(length_s, 1e-3)),
            max_replicas=question.max_replicas,
        )
        found = plan(asked, lambda name: self._watch(f"replicas: {name}"))
        shown = found.answer or found.tried[-1]
        return ReplicasNeeded(
            number=None if found.answer is None else found.answer.replicas,
            most=question.max_replicas,
            least=question.attainment,
            attainment=shown.attainment["both"],
            peak_s=found.peak.end_s - found.peak.start_s,
            peak_requests=found.peak.requests,
        )


# ---- intervals ----


def attainment_estimate(values: Sequence[float], chats: int) -> Estimate:
    """The first value, with an interval for the chance of so few chats and the spread of the draws."""
    value = values[0]
    low, high = _wilson(value, chats)
    spread = _spread(values)
    return Estimate(
        value,
        max(value - math.hypot(value - low, spread), 0.0),
        min(value + math.hypot(high - value, spread), 1.0),
    )


def rate_estimate(values: Sequence[float], error: float) -> Estimate:
    """The first value, with an interval for the error of step times and the spread of the draws."""
    value = values[0]
    half = math.hypot(_spread(values), Z * error * value)
    return Estimate(value, max(value - half, 0.0), value + half)


def _spread(values: Sequence[float]) -> float:
    """Half of the 90% interval that the draws give; 0 without draws, where nothing is known of it."""
    others = len(values) - 1
    if others < 1:
        return 0.0
    factor = STUDENT[others] if others < len(STUDENT) else Z
    return factor * float(np.std(values, ddof=1))


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 90% interval of a share."""
    if count == 0:
        return 0.0, 1.0
    square = Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return min(middle - half, share), max(middle + half, share)
