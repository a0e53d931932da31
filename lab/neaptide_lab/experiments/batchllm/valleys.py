"""BatchLLM's figures 2 and 9, table 2: steps that run nearly empty, and what batching by memory does about them."""

import logging
from typing import Any

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide.engine.offline.planning.plan import plan_pool
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.generated_sets import INDUSTRY_REQUESTS
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.pools.planned import pool_of
from neaptide_lab.experiments.batchllm.runs import SEATS, Engine, Outcome, run_to_the_end, slots_by_memory
from neaptide_lab.experiments.batchllm.saving import scaled
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "batchllm-valleys"
ABOUT = "steps below half of their tokens, with a cap on requests and with memory as the only cap (BatchLLM, table 2)"

PROFILE, SET = "a100-80g-qwen2.5-7b", "batchllm-industry"
FULL_SCALE, QUICK_SCALE = 2, 8
VALLEY = 0.5
"""A step with fewer of its tokens is one."""
CUT_SHARE = 0.1
"""Fraction of the steps cut off at both ends, because every run fills and drains."""
RUNS = {
    "shuffled, by requests": ("balance", SEATS),
    "shuffled, by memory": ("balance", None),
    "groups, by requests": ("batchllm", SEATS),
    "groups, by memory": ("batchllm", None),
}
"""Order, and what caps the requests at work."""
PAPER_GAINS = (2.6, 3.8)
"""Percent that batching by memory gains in table 2: 5.79 to 5.94 and 8.16 to 8.47 requests/s."""


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    scale = QUICK_SCALE if quick else FULL_SCALE
    profile = scaled(load_profile(PROFILE), scale)
    set_ = load_offline(SET, seed=0, limit=INDUSTRY_REQUESTS // scale)
    pool = pool_of(set_.requests, profile)
    found: dict[str, Outcome] = {}
    shares: dict[str, FloatArray] = {}
    for name, (policy, seats) in RUNS.items():
        logger.info("%s", name)
        (order,) = plan_pool(pool, policy)
        engine = Engine("fcfs", slots_by_memory(pool) if seats is None else seats // scale)
        found[name] = run_to_the_end(SET, set_.requests, order, profile, engine)
        shares[name] = _fill(found[name], engine)
    rows = [Row(f"{name}: steps in valleys", 100 * _valleys(one), None, "%", 1) for name, one in shares.items()]
    rows += [Row(f"{name}: rate", one.requests_per_s, None, "req/s") for name, one in found.items()]
    for rows_are, paper in zip(("shuffled", "groups"), PAPER_GAINS, strict=True):
        capped, free = (f"{rows_are}, by {cap}" for cap in ("requests", "memory"))
        gain = 100 * (found[free].requests_per_s / found[capped].requests_per_s - 1)
        rows.append(Row(f"{rows_are}: gain of batching by memory", gain, paper, "%"))
        fewer = 100 * (_valleys(shares[capped]) - _valleys(shares[free]))
        holds = fewer >= 0 if rows_are == "groups" else None
        rows.append(Row(f"{rows_are}: fewer valleys by", fewer, None, "points", 1, holds))
    data = {
        name: {"valleys": _valleys(one), "requests_per_s": found[name].requests_per_s} for name, one in shares.items()
    }
    return ExperimentResult(NAME, rows, _notes(scale), data, lambda figure: _plot(figure, shares))


def _fill(outcome: Outcome, engine: Engine) -> FloatArray:
    """[steps] tokens of each, of what it may have; without the ends of the run."""
    cut = int(CUT_SHARE * len(outcome.step_tokens))
    return outcome.step_tokens[cut : len(outcome.step_tokens) - cut] / engine.step_tokens


def _valleys(fill: FloatArray) -> float:
    return float(np.mean(fill < VALLEY)) if len(fill) else 0.0


def _notes(scale: int) -> list[str]:
    return [
        f"1/{scale} of the {INDUSTRY_REQUESTS:,} requests of {SET} on 1/{scale} of the KV memory of {PROFILE} and of "
        "256 requests at work, steps of 2,048 tokens, kappa 1. A tenth of the steps is cut off at both ends.",
        "Table 2's rows are the paper's engine without and with its batching, on two loads that it does not describe "
        "further; ours beside them are shuffled rows and groups. Here a request is admitted with its whole answer in "
        "mind where memory is the cap, so that none is preempted.",
    ]


def _plot(figure: Any, shares: dict[str, FloatArray]) -> None:
    for axes, (name, fill) in zip(figure.subplots(len(shares), 1, sharex=True), shares.items(), strict=True):
        axes.plot(np.arange(len(fill)), 100 * fill, linewidth=0.5)
        axes.set_title(name)
        axes.set_ylabel("% of a step")
