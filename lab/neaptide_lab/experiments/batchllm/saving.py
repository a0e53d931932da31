"""BatchLLM's figure 8: how many prompt tokens prefix groups save over a whole run, and how many an LRU cache."""

import logging
from typing import Any

import msgspec

from neaptide.engine.offline.planning.plan import plan_pool
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.generated_sets import BATCHLLM_REQUESTS
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.pools.planned import pool_of
from neaptide_lab.experiments.batchllm.runs import SEATS, Engine, run_to_the_end, slots_by_memory
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "batchllm-saving"
ABOUT = "prompt tokens that prefix groups save over a whole run, against an LRU cache (BatchLLM, figure 8)"

PROFILE = "a100-80g-llama-3.1-8b"
FULL = (
    (2000, 200, 4),
    (2000, 200, 16),
    (2000, 1000, 4),
    (2000, 1000, 16),
    (1000, 1000, 4),
    (1000, 1000, 16),
    (16000, 200, 16),
)
QUICK = ((2000, 200, 16), (16000, 200, 16))
"""Prefix, own part, sharing degree."""
PAPER = {(2000, 200, 16): (40.1, 85.2), (16000, 200, 16): (6.3, 92.6)}
"""Percent under vLLM's LRU and under BatchLLM."""
FULL_SCALE, QUICK_SCALE = 4, 8
"""Factors by which there are fewer requests than the paper's 6,400, less memory and fewer slots."""
RUNS = {"fcfs, shuffled": ("balance", "fcfs"), "batchllm": ("batchllm", "fcfs"), "neaptide": ("balance", "neaptide")}
"""The order, and the scheduler that runs it."""


def scaled(profile: DeviceProfile, scale: int) -> DeviceProfile:
    """The profile with KV memory smaller by this factor, so that the same part of a pool fits that is smaller by the
    same factor."""
    return msgspec.structs.replace(profile, num_blocks=profile.num_blocks // scale)


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    scale = QUICK_SCALE if quick else FULL_SCALE
    profile = scaled(load_profile(PROFILE), scale)
    rows: list[Row] = []
    found: dict[str, dict[str, float]] = {}
    for case in QUICK if quick else FULL:
        name = "batchllm-{}-{}-s{}".format(*case)
        set_ = load_offline(name, seed=0, limit=BATCHLLM_REQUESTS // scale)
        pool, bound = pool_of(set_.requests, profile), set_.sharing(profile.block_size).ratio
        found[name] = {"bound": bound}
        for run_name, (policy, scheduler) in RUNS.items():
            logger.info("%s, %s", name, run_name)
            (order,) = plan_pool(pool, policy)
            engine = Engine(scheduler, min(SEATS // scale, slots_by_memory(pool)), has_all_memory=True)
            found[name][run_name] = saving = run_to_the_end(name, set_.requests, order, profile, engine).saving
            lru, groups = PAPER.get(case, (None, None))
            paper = {"fcfs, shuffled": lru, "batchllm": groups}.get(run_name)
            holds = None if run_name == "fcfs, shuffled" else abs(saving - bound) < 1e-9
            label = "{}/{} sd{}: {}".format(*case, run_name)
            rows.append(Row(f"{label}, bound {bound:.2%}", 100 * saving, paper, "%", holds=holds))
    return ExperimentResult(NAME, rows, _notes(scale), {"savings": found, "scale": scale}, _plotter(found))


def _notes(scale: int) -> list[str]:
    return [
        f"1/{scale} of the paper's 6,400 requests on 1/{scale} of the KV memory of {PROFILE} and of 256 seats: what an "
        "LRU cache keeps is a matter of their ratio. The paper's LRU figures are of its own models, memory and order.",
        "Over the whole run, tokens that were computed again after a preemption included. The bound counts whole "
        "blocks of 16 tokens; what must hold is that groups reach it exactly.",
    ]


def _plotter(found: dict[str, dict[str, float]]) -> Any:
    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for number, name in enumerate(RUNS):
            places = [place + 0.25 * number for place in range(len(found))]
            axes.bar(places, [100 * one[name] for one in found.values()], 0.25, label=name)
        bounds = [100 * one["bound"] for one in found.values()]
        axes.plot([place + 0.25 for place in range(len(found))], bounds, "k_", markersize=40, label="bound")
        axes.set_xticks([place + 0.25 for place in range(len(found))], [name[9:] for name in found])
        axes.set_ylabel("prompt tokens saved, %")
        axes.legend()

    return plot
