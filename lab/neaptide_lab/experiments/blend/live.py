"""Blending with live traffic: one mixed pool is done together with an online trace, in each order.

No paper has this table. BlendServe runs a pool alone, Echo and BROS run requests beside online ones in the order in
which they came. The pool has rows that share much and answer with a letter, long prompts with short answers, and short
prompts with long answers; every policy works off the same one, and what is done of it counts when all of it is done: an
order that leaves the slow rows for last is not faster for it. Nor does a rate count that chats pay for: a rival that
misses what it was told is told less, until it attains what ours does.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.estimator.device_profile import load_profile
from neaptide.estimator.recipes import DEFAULT_HEADROOM
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.result import SimResult, online_result
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-live"
ABOUT = (
    "a mixed offline pool beside online load: neaptide, Echo, and Echo's base with depth-first and BlendServe's order"
)

PROFILE = "a100-80g-llama-3.1-8b"
TRACE = "azure_conv_2023"
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
STEP_NOISE = 0.05
CONTEXT_TOKENS = 16_384
CLIENT_LIMIT_TOKENS = 4096
SEATS = 1024
INSTRUCTION_TOKENS, OWN_TOKENS = 128, 64
"""Prompts of the job with long answers: one instruction, and what each is about."""
LONG_TOKENS = (500, 2500)
"""Answers of that job, uniform."""
FOR_EVER_S = 1e9
WAYS: dict[str, tuple[str, str | None]] = {
    "echo": ("echo", None),
    "bs+e, dfs": ("bs+e", "dfs"),
    "bs+e, blendserve": ("bs+e", "blendserve"),
    "neaptide": ("neaptide", None),
    "neaptide, groups": ("neaptide", "neaptide"),
    "neaptide, two ends": ("neaptide", DUAL_SCAN),
    "neaptide, as a server plans": ("neaptide", DUAL_SCAN),
}
"""Policy and plan."""
UNTOLD = ("neaptide, as a server plans",)
"""Policies whose planner does not know an answer's length before it has ended."""
OURS = "neaptide"
RIVALS = ("echo", "bs+e, dfs", "bs+e, blendserve")
HEADROOM = {"echo": "mu-sigma"}
"""The forecast that Echo publishes; the others take the default."""
TOLD_TPOT_S = (0.046, 0.044, 0.042)
"""Their deadlines go by the arrival, so a chat whose first token was early may be slower than the target, and half of
the steps are longer than predicted."""
TOLD = ", told "
CONCEDED = 0.01
"""Largest deficit of attainment with which a rival's rate still counts."""


@dataclass(slots=True, frozen=True)
class Size:
    questions: int
    papers: int
    long_answers: int
    window_s: tuple[float, float]
    """Window in trace time; online work should last as long as the pool does."""
    speeds: tuple[float, ...]
    kappas: tuple[float, ...]


FULL = Size(4000, 300, 1400, (600.0, 780.0), (0.5, 1.0), (0.2, 1.0))
QUICK = Size(2000, 150, 700, (600.0, 660.0), (0.5,), (0.2,))
"""Smaller pools fit into the memory as a whole, and then no order matters."""


def run(quick: bool) -> ExperimentResult:
    size, logger = QUICK if quick else FULL, logging.getLogger(__name__)
    offline = pool(size)
    cells: dict[str, dict[str, SimResult]] = {}
    for speed in size.speeds:
        for kappa in size.kappas:
            name = f"speed {speed:g}, kappa {kappa:g}"
            logger.info("%s, online alone", name)
            runs = {"alone": simulate(_scenario(size, speed, kappa, "neaptide", None, [])).result}
            for way, (policy, plan) in WAYS.items():
                logger.info("%s, %s", name, way)
                scenario = _scenario(size, speed, kappa, policy, plan, offline)
                runs[way] = simulate(replace(scenario, planner_is_told=way not in UNTOLD)).result
            least = _attained(runs[OURS]) - CONCEDED
            for way in [way for way in RIVALS if way in runs and _attained(runs[way]) < least]:
                scenario = _scenario(size, speed, kappa, *WAYS[way], offline)
                logger.info("%s, %s, told less", name, way)
                runs |= {f"{way}{TOLD}{told}": result for told, result in told_less(scenario, least).items()}
            cells[name] = runs
    tokens = sum(r.input_tokens + r.output_tokens for one in offline for r in one.requests)
    rows = [row for name, runs in cells.items() for row in _rows(name, runs, tokens)]
    notes = [
        f"{PROFILE}; {size.questions:,} MMLU questions with their examples, {size.papers:,} arXiv papers to summarise "
        f"and {size.long_answers:,} prompts of {INSTRUCTION_TOKENS + OWN_TOKENS} tokens ({INSTRUCTION_TOKENS} of them "
        f"an instruction in common) with answers of {LONG_TOKENS[0]:,} to {LONG_TOKENS[1]:,}, shuffled into one job; "
        f"beside {TRACE}, {size.window_s[0]:g} to {size.window_s[1]:g} s. TTFT {TTFT_SLO_S:g} s, TPOT "
        f"{1e3 * TPOT_SLO_S:.0f} ms, steps with {STEP_NOISE:.0%} noise, {SEATS:,} seats.",
        "Offline tokens/s: those of the whole pool, found in the cache or not, over the time until its last row has "
        "ended. Attainment is of all online requests, by TTFT and TPOT, and from arrival: every token k by "
        "TTFT + (k - 1) TPOT behind the arrival.",
        "Plans know the lengths of 1% of the answers, and no other; as a server plans that of none that has not ended, "
        "and it plans again 5, 15, 35, ... s later; orders by density of policies other than ours are "
        "one fixed order, as their policy does not blend.",
    ]
    data = {
        "tokens": tokens,
        "cells": {
            name: {way: _numbers(result, tokens) for way, result in runs.items()} for name, runs in cells.items()
        },
    }
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, cells, tokens))


def told_less(scenario: Scenario, least: float) -> dict[str, SimResult]:
    """Results by the pace that the policy aims at, decreased until it attains ``least`` by the promised one."""
    found: dict[str, SimResult] = {}
    for told_s in TOLD_TPOT_S:
        run = simulate(replace(scenario, tpot_slo_s=told_s))
        online = online_result(run.measures, run.window_s, run.window_s[1], (TTFT_SLO_S, TPOT_SLO_S))
        online.attainment["both_from_arrival"] = None  # counted by the pace aimed at
        found[f"{1e3 * told_s:.0f} ms"] = result = msgspec.structs.replace(run.result, online=online)
        if _attained(result) >= least:
            break
    return found


def pool(size: Size) -> list[OfflineSet]:
    rng = np.random.default_rng(0)
    base = content_base(f"{NAME}#0")
    lengths = rng.integers(*LONG_TOKENS, size.long_answers, endpoint=True).tolist()
    long_answers = [
        TraceRequest(0.0, ((base, INSTRUCTION_TOKENS), (base + 1 + k, OWN_TOKENS)), length)
        for k, length in enumerate(lengths)
    ]
    return [
        load_offline("mmlu", seed=0, limit=size.questions),
        load_offline("arxiv_summarization_lengths", seed=0, limit=size.papers),
        OfflineSet(NAME, long_answers, synthetic=True),
    ]


def _scenario(
    size: Size, speed: float, kappa: float, policy: str, plan: str | None, offline: list[OfflineSet]
) -> Scenario:
    return Scenario(
        profile=load_profile(PROFILE),
        online=online_requests(TRACE, seed=0, window_s=size.window_s, speed=speed),
        offline=offline,
        policy=policy,
        plan=plan,
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        overlap_kappa=kappa,
        max_model_len=CONTEXT_TOKENS,
        max_output_tokens=CLIENT_LIMIT_TOKENS,
        max_num_seqs=SEATS,
        step_noise=STEP_NOISE,
        headroom=HEADROOM.get(policy, DEFAULT_HEADROOM),
        refill=False,
        window_s=(0.0, FOR_EVER_S),
        with_bounds=False,
    )


def _rate(result: SimResult, tokens: int) -> float:
    return tokens / (result.offline.makespan_s or FOR_EVER_S)


def _attained(result: SimResult, definition: str = "both") -> float:
    return result.online.attainment[definition] or 0.0


def _rows(name: str, runs: dict[str, SimResult], tokens: int) -> list[Row]:
    ours, rows = runs[OURS], list[Row]()
    for way, result in runs.items():
        case = f"{name}: {way}"
        if way != "alone":
            keeps_up = way.partition(TOLD)[0] in RIVALS and _attained(result) >= _attained(ours) - CONCEDED
            holds = _rate(ours, tokens) >= _rate(result, tokens) if keeps_up else None
            rows.append(Row(f"{case}, offline tokens/s", _rate(result, tokens), digits=0, holds=holds))
        lost = _attained(runs["alone"]) - _attained(result)
        is_kept = lost <= CONCEDED if way == OURS else None
        rows.append(Row(f"{case}, attainment", 100 * _attained(result), unit="%", holds=is_kept))
    return rows


def _numbers(result: SimResult, tokens: int) -> dict[str, Any]:
    return {
        "offline_tokens_per_s": _rate(result, tokens) if result.offline.makespan_s else None,
        "attainment": result.online.attainment,
        "ttft_s": result.online.ttft_s,
        "tpot_s": result.online.tpot_s,
        "hit_ratio": result.kv.hit_ratio,
        "online_hit_ratio": result.kv.online_hit_ratio,
        "saving_ratio": result.kv.saving_ratio,
        "preemptions": msgspec.to_builtins(result.preemptions),
        "wasted_tokens": result.wasted_tokens,
        "steps": result.steps,
    }


def _plot(figure: Any, cells: dict[str, dict[str, SimResult]], tokens: int) -> None:
    """A line for each rival, from the real target to the tighter one that it must aim at to attain it. Right and high
    is good."""
    for axes, (name, runs) in zip(np.atleast_1d(figure.subplots(1, len(cells))), cells.items(), strict=True):
        for way in (way for way in WAYS if way in runs):
            told = [result for one, result in runs.items() if one == way or one.startswith(f"{way}{TOLD}")]
            rates, attained = [_rate(result, tokens) for result in told], [100 * _attained(result) for result in told]
            axes.plot(rates, attained, marker="o" if way in RIVALS else "*", label=way)
        axes.axhline(100 * _attained(runs["alone"]), color="k", linestyle=":", label="online alone")
        axes.set_title(name)
        axes.set_xlabel("offline tokens per second, logical")
        axes.set_ylabel("online requests with both targets, %")
    axes.legend()
