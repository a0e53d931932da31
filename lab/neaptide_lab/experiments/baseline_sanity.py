"""Every scheduling policy on one trace beside an offline flood, and the known failure of ``priority``.

The first part runs all policies on the same online trace and the same pool, ``bros`` also at its paper's targets and
on its paper's load. The second replays a live measurement of vLLM on a CPU (``cases.vllm_cpu``).
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import delayed
from neaptide.simulation.result import Percentiles, SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.bros.one_load import bros_rows, run_bros_load
from neaptide_lab.experiments.bros.setting import TPOT_SLO_S as BROS_TPOT_SLO_S
from neaptide_lab.experiments.bros.setting import TTFT_SLO_S as BROS_TTFT_SLO_S
from neaptide_lab.experiments.cases.vllm_cpu import CPU_CASES, MANY_FOLD, cpu_notes, cpu_rows, milliseconds, run_case
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.policies import RIVALS

NAME = "baseline-sanity"
ABOUT = "every policy beside an offline flood; what priority does to online latency against vLLM on a CPU"

PROFILE = "h100-80g-llama-3.1-8b"
TRACE, OFFLINE = "azure_conv_2023", "batchllm-2000-200-s4"
OFFLINE_REQUESTS = 1200
"""Submitted at once; more follow before they run out. Their prefixes are more than the cache holds."""
WARM_UP_S = 10.0
"""The flood runs for this long before the first online request, which opens the window."""
CONTEXT_TOKENS = 8192
"""Prompts of ``fcfs-v0`` and ``priority-v0`` share a step up to this many tokens: it is part of what they are."""
CLIENT_LIMIT_TOKENS = 512
"""``max_tokens`` of every request, online and offline: ``lpm`` reserves by it. Longer answers end there."""
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
DRAIN_S = 600.0
"""Time after the last arrival in which online requests may end; enough for all."""


@dataclass(slots=True, frozen=True)
class Size:
    """How much is run."""

    window_s: tuple[float, float]
    """Window in trace time."""
    drains: bool
    """Whether every online request comes to its end. Otherwise the run ends when those without an end have missed."""
    has_ceilings: bool
    cpu_seeds: int
    """Draws of the arrivals: the p99 of some 60 requests is the luck of one."""
    bros_load_s: float


FULL = Size((600.0, 660.0), drains=True, has_ceilings=True, cpu_seeds=5, bros_load_s=120.0)
QUICK = Size((600.0, 608.0), drains=False, has_ceilings=False, cpu_seeds=1, bros_load_s=0.0)


@dataclass(slots=True, frozen=True)
class Outcome:
    """One run."""

    result: SimResult
    digest: str
    """Digest of every step's requests and their computed tokens."""


@dataclass(slots=True, frozen=True)
class PolicyRuns:
    flood: Outcome
    alone: Outcome
    """No offline work."""
    ceiling: Outcome | None
    """No online work."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    runs = {policy: _policy_runs(policy, size) for policy in ("neaptide", "fcfs", "priority", *RIVALS)}
    bros = _bros_at_its_targets(size)
    bros_load = run_bros_load(0, size.bros_load_s) if size.bros_load_s else {}
    cpu = [run_case(case, range(size.cpu_seeds)) for case in CPU_CASES]
    rows = [*_policy_rows(runs, bros), *(bros_rows(bros_load) if bros_load else []), *cpu_rows(cpu)]
    data = {
        "settings": {
            "profile": PROFILE,
            "trace": TRACE,
            "window_s": list(size.window_s),
            "warm_up_s": WARM_UP_S,
            "drains": size.drains,
            "offline": OFFLINE,
            "context_tokens": CONTEXT_TOKENS,
            "max_output_tokens": CLIENT_LIMIT_TOKENS,
            "ttft_slo_s": TTFT_SLO_S,
            "tpot_slo_s": TPOT_SLO_S,
        },
        "policies": {policy: _policy_data(one, runs["fcfs"]) for policy, one in runs.items()},
        "bros_at_its_targets": _result_numbers(bros.result),
        "bros_load": {policy: _result_numbers(result) for policy, result in bros_load.items()},
        "cpu": {one.case.name: [_result_numbers(result) for result in one.results] for one in cpu},
    }
    notes = [*_setting_notes(size), *_policy_notes(runs, bros), *cpu_notes(cpu)]
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, runs), against="vllm-cpu")


# ---- the runs -----------------------------------------------------------------------------------------------


class PlanDigest(EngineObserver):
    """A digest of which requests computed how many tokens, step by step."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        parts = zip(step.plan.request_ids, step.plan.num_tokens.tolist(), strict=True)
        self.sha256.update((",".join(f"{request_id}={count}" for request_id, count in parts) + "\n").encode())


def outcome(scenario: Scenario) -> Outcome:
    """Raises what ``simulate`` raises."""
    plans = PlanDigest()
    run = simulate(scenario, observers=[plans])
    return Outcome(run.result, plans.sha256.hexdigest())


def _scenario(policy: str, size: Size, ttft_slo_s: float = TTFT_SLO_S, tpot_slo_s: float = TPOT_SLO_S) -> Scenario:
    """With online and offline work."""
    trace = online_requests(TRACE, window_s=size.window_s)
    return Scenario(
        profile=load_profile(PROFILE),
        policy=policy,
        online=delayed(trace, WARM_UP_S),
        offline=[load_offline(OFFLINE, seed=0, limit=OFFLINE_REQUESTS)],
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
        max_model_len=CONTEXT_TOKENS,
        max_output_tokens=CLIENT_LIMIT_TOKENS,
        drain_s=DRAIN_S if size.drains else ttft_slo_s + CLIENT_LIMIT_TOKENS * tpot_slo_s,
    )


def _policy_runs(policy: str, size: Size) -> PolicyRuns:
    logging.getLogger(__name__).info("policy %s", policy)
    both = _scenario(policy, size)
    return PolicyRuns(
        flood=outcome(both),
        alone=outcome(replace(both, offline=())),
        ceiling=outcome(replace(both, online=())) if size.has_ceilings else None,
    )


def _bros_at_its_targets(size: Size) -> Outcome:
    logging.getLogger(__name__).info("policy bros at its paper's targets")
    return outcome(_scenario("bros", size, BROS_TTFT_SLO_S, BROS_TPOT_SLO_S))


# ---- what it says -------------------------------------------------------------------------------------------


def _policy_rows(runs: dict[str, PolicyRuns], bros: Outcome) -> list[Row]:
    rows = [
        Row(f"{policy}: attainment", _percent(_attainment(one.flood)), unit="%", digits=1)
        for policy, one in runs.items()
    ]
    others = [one for policy, one in runs.items() if policy != "fcfs"]
    num_other = sum(one.flood.digest != runs["fcfs"].flood.digest for one in others)
    failing = runs["priority"]
    flood_s, alone_s = (one.result.online.tpot_s["p99"] or 0.0 for one in (failing.flood, failing.alone))
    free_slot, is_many_fold = flood_s / alone_s, flood_s >= MANY_FOLD * alone_s
    return [
        *rows,
        Row("bs+e: attainment by its own deadlines", _percent(_on_deadline(runs["bs+e"].flood)), unit="%", digits=1),
        Row("bros: attainment at its paper's targets", _percent(_attainment(bros)), unit="%", digits=1),
        Row("priority: TPOT p99 over alone", free_slot, unit="x", digits=1, holds=is_many_fold),
        Row(f"policies unlike fcfs, of {len(others)}", num_other, digits=0, holds=num_other == len(others)),
    ]


def _setting_notes(size: Size) -> list[str]:
    notes = [
        f"Policies: {TRACE} beside {OFFLINE} that never runs dry and has run for {WARM_UP_S:.0f} s when the window "
        f"opens; profile {PROFILE}, context {CONTEXT_TOKENS}, TTFT {TTFT_SLO_S:g} s, TPOT {1e3 * TPOT_SLO_S:g} ms, "
        "256 seats, 2,048 tokens a step, no noise, planning time charged.",
        f"All requests come with max_tokens {CLIENT_LIMIT_TOKENS}, all that a policy knows of lengths; lpm reserves by "
        "it. Longer answers end there.",
        "Alone is the same policy with an empty pool. Policies that serve by arrival hardly do online work inside the "
        "window: their TTFT is the time that the backlog takes, and their offline rate may exceed their ceiling.",
    ]
    if size.has_ceilings:
        notes.append("Offline is given beside its ceiling: the same without online work, steady state.")
    if not size.drains:
        notes.append(
            "A run ends when no request can attain its targets any more: TTFT p99 counts what requests without a token "
            "have waited until then, TPOT p99 leaves out those without an end."
        )
    return notes


def _policy_notes(runs: dict[str, PolicyRuns], bros: Outcome) -> list[str]:
    own, alone = runs["bros"].flood, runs["bros"].alone
    bs_e = runs["bs+e"].flood
    notes = [
        *(_line(policy, one) for policy, one in runs.items()),
        f"bs+e: {_percent(_attainment(bs_e)):.1f}% attain TTFT and TPOT as they are measured here, "
        f"{_percent(_on_deadline(bs_e)):.1f}% its own deadlines, arrival + TTFT + (k - 1) TPOT. A first token that "
        "comes early is a reserve that it spends on offline work; a TPOT measured from the first token takes that for "
        "delay.",
        f"bros: cuts no prompts, so a whole prompt must fit the least slack of the streams. At TPOT "
        f"{1e3 * TPOT_SLO_S:g} ms long ones wait until they are late, {_percent(_attainment(own)):.1f}% attained, "
        f"{_percent(_attainment(alone)):.1f}% even alone. At its paper's targets ({BROS_TTFT_SLO_S:g} s, "
        f"{BROS_TPOT_SLO_S:g} s): {_percent(_attainment(bros)):.1f}%, TTFT p50 "
        f"{_ms(bros.result.online.ttft_s, 'p50')} ms, p99 {_ms(bros.result.online.ttft_s, 'p99')} ms, offline "
        f"{_rate(bros)} tokens/s. On its paper's load see lab/notebook/baselines.md.",
    ]
    notes += [f"{policy}: its pool ran dry, the run is not valid" for policy, one in runs.items() if not _valid(one)]
    return notes


def _line(policy: str, one: PolicyRuns) -> str:
    """Latencies in ms; attainment by deadlines from arrival."""
    flood, alone = one.flood.result.online, one.alone.result.online
    ceiling = f" of {_rate(one.ceiling)}" if one.ceiling is not None else ""
    return (
        f"{policy}: TTFT p99 {_ms(flood.ttft_s, 'p99')} ms (alone {_ms(alone.ttft_s, 'p99')}), "
        f"TPOT p99 {_ms(flood.tpot_s, 'p99')} ms ({_ms(alone.tpot_s, 'p99')}), "
        f"from arrival {_percent(_on_deadline(one.flood)):.1f}%, "
        f"offline {_rate(one.flood)}{ceiling} tokens/s, {_num_preemptions(one.flood)} preemptions"
    )


def _plot(figure: Any, runs: dict[str, PolicyRuns]) -> None:
    names, ones = list(runs), list(runs.values())
    alone = [one.alone for one in ones]
    ceilings = [one.ceiling for one in ones if one.ceiling is not None]
    panels: tuple[tuple[str, Callable[[Outcome], float], list[Outcome]], ...] = (
        ("online TTFT p99, ms", lambda one: milliseconds(one.result.online.ttft_s["p99"]), alone),
        ("online TPOT p99, ms", lambda one: milliseconds(one.result.online.tpot_s["p99"]), alone),
        ("offline tokens/s", lambda one: one.result.offline_tokens_per_s, ceilings),
    )
    for axes, (label, value, others) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        axes.barh(names, [value(one.flood) for one in ones], label="beside each other")
        if others:
            axes.barh(names, [value(other) for other in others], height=0.3, label="alone")
        axes.set(xlabel=label, xscale="log" if "ms" in label else "linear")
    handles_and_labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles_and_labels, loc="outside upper center", ncols=2)


# ---- numbers ------------------------------------------------------------------------------------------------


def _policy_data(runs: PolicyRuns, fcfs: PolicyRuns) -> dict[str, Any]:
    return {
        "differs_from_fcfs": runs.flood.digest != fcfs.flood.digest,
        "digest": runs.flood.digest,
        "flood": _result_numbers(runs.flood.result),
        "alone": _result_numbers(runs.alone.result),
        "ceiling": None if runs.ceiling is None else _result_numbers(runs.ceiling.result),
    }


def _result_numbers(result: SimResult) -> dict[str, Any]:
    return {
        "valid": result.valid,
        "steps": result.steps,
        "requests": result.online.requests,
        "ttft_s": result.online.ttft_s,
        "tpot_s": result.online.tpot_s,
        "attainment": result.online.attainment,
        "offline_tokens_per_s": result.offline.tokens_per_s,
        "hit_ratio": result.kv.hit_ratio,
        "preemptions": result.preemptions.count_by_class,
        "recomputed_tokens": result.preemptions.recomputed_tokens,
        "scheduler_ms": result.scheduler_ms,
        "wall_s": round(result.wall_s, 1),
    }


def _attainment(one: Outcome) -> float | None:
    return one.result.online.attainment["both"]


def _on_deadline(one: Outcome) -> float | None:
    """By Echo's deadlines, from arrival."""
    return one.result.online.attainment["both_from_arrival"]


def _percent(share: float | None) -> float:
    return 100.0 * (share or 0.0)


def _ms(percentiles: Percentiles, name: str) -> str:
    seconds = percentiles[name]
    return "-" if seconds is None else f"{1e3 * seconds:,.0f}"


def _rate(one: Outcome) -> str:
    return f"{one.result.offline_tokens_per_s:,.0f}"


def _num_preemptions(one: Outcome) -> int:
    return sum(one.result.preemptions.count_by_class.values())


def _valid(runs: PolicyRuns) -> bool:
    return runs.flood.result.valid
