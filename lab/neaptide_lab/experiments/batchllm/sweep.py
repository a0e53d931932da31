"""BatchLLM's figure 6: what prefix groups gain as prefixes get longer and more prompts share them."""

import logging
from itertools import product
from typing import Any

from neaptide.engine.offline.planning.plan import plan_pool
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.generated_sets import BATCHLLM_REQUESTS
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.pools.planned import pool_of
from neaptide_lab.experiments.batchllm.runs import SEATS, Engine, Outcome, run_to_the_end, slots_by_memory
from neaptide_lab.experiments.batchllm.saving import PROFILE, scaled
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "batchllm-sweep"
ABOUT = "gain of prefix groups over vLLM by prefix length and sharing degree (BatchLLM, figure 6)"

OWN_TOKENS = 200
PREFIXES, DEGREES = (2000, 4000, 8000, 16000), (2, 4, 8, 16)
FULL = tuple(product(PREFIXES, DEGREES))
QUICK = ((2000, 2), (2000, 16))
"""Prefix, sharing degree."""
FULL_SCALE, QUICK_SCALE = 8, 16
"""Factors by which there are fewer requests than the paper's 6,400, less memory and fewer slots."""
PAPER = {(2000, 2): 1.7, (16000, 16): 10.8}
"""Times vLLM's rate on the A100, as the text has it for two corners; 1.5 and 9.5 on the MI200."""
RUNS = {
    "fcfs": ("balance", "fcfs", SEATS),
    "fcfs, sorted": ("dfs", "fcfs", SEATS),
    "batchllm": ("batchllm", "fcfs", None),
    "neaptide": ("balance", "neaptide", None),
}
"""Order, scheduler, slots; None: as memory allows."""


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    scale = QUICK_SCALE if quick else FULL_SCALE
    profile = scaled(load_profile(PROFILE), scale)
    found: dict[tuple[int, int], dict[str, Outcome]] = {}
    for prefix, degree in QUICK if quick else FULL:
        name = f"batchllm-{prefix}-{OWN_TOKENS}-s{degree}"
        set_ = load_offline(name, seed=0, limit=BATCHLLM_REQUESTS // scale)
        pool = pool_of(set_.requests, profile)
        found[prefix, degree] = {}
        for run_name, (policy, scheduler, seats) in RUNS.items():
            logger.info("%s, %s", name, run_name)
            (order,) = plan_pool(pool, policy)
            engine = Engine(scheduler, slots_by_memory(pool) if seats is None else max(seats // scale, 1))
            found[prefix, degree][run_name] = run_to_the_end(name, set_.requests, order, profile, engine)
    rows = [row for (prefix, degree), runs in found.items() for row in _rows(prefix, degree, runs)]
    data = {
        f"{prefix} s{degree}": {name: one.requests_per_s for name, one in runs.items()}
        for (prefix, degree), runs in found.items()
    }
    return ExperimentResult(NAME, rows, _notes(scale), {"requests_per_s": data}, lambda figure: _plot(figure, found))


def _rows(prefix: int, degree: int, runs: dict[str, Outcome]) -> list[Row]:
    case, base = f"prefix {prefix:,}, degree {degree}", runs["fcfs"].requests_per_s
    rows = [Row(f"{case}: fcfs", base, None, "req/s")]
    for name in list(RUNS)[1:]:
        gain = runs[name].requests_per_s / base
        # Sorted prompts find the same prefixes: what groups add to them is theirs alone, and must not be a loss.
        holds = None if name == "fcfs, sorted" else gain >= runs["fcfs, sorted"].requests_per_s / base * (1 - 0.01)
        rows.append(
            Row(f"{case}: {name}", gain, PAPER.get((prefix, degree)) if name == "batchllm" else None, "x", 2, holds)
        )
    return rows


def _notes(scale: int) -> list[str]:
    return [
        f"1/{scale} of the paper's 6,400 requests on 1/{scale} of the KV memory of {PROFILE} and of 256 seats, own "
        f"parts of {OWN_TOKENS} tokens, answers of 100, kappa 1. Steps are as much smaller than at full size, so that "
        "the weights, which every step reads, weigh more; no profile has the paper's kernel, which reads a shared "
        "prefix once.",
        "What must hold: groups are not slower than sorted prompts by more than 1%.",
    ]


def _plot(figure: Any, found: dict[tuple[int, int], dict[str, Outcome]]) -> None:
    axes = figure.subplots()
    for prefix in dict.fromkeys(prefix for prefix, _ in found):
        degrees = [degree for one, degree in found if one == prefix]
        gains = [
            found[prefix, degree]["batchllm"].requests_per_s / found[prefix, degree]["fcfs"].requests_per_s
            for degree in degrees
        ]
        axes.plot(degrees, gains, "o-", label=f"prefix {prefix:,}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("sharing degree")
    axes.set_ylabel("batchllm over fcfs")
    axes.legend()
