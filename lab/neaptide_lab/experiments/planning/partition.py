"""BlendServe's data parallelism (section 5.5): how even the parts of a pool are, and what sharing they lose."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.planning.blend import rank
from neaptide.engine.offline.planning.partition import partition
from neaptide.engine.offline.planning.plan import PromptPool, dual_scanned, plan_pool
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.pools.planned import pool_of
from neaptide.simulation.pools.prefix_cache import Eviction, cached_tokens
from neaptide_lab.experiments.batchllm.runs import Engine, run_to_the_end, slots_by_memory
from neaptide_lab.experiments.batchllm.saving import scaled
from neaptide_lab.experiments.blend.setting import PROFILE, TRACES, pool_with_true_lengths, trace
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-partition"
ABOUT = "a pool parted for 2 and 4 replicas: work, density, sharing, and what a simulated run gains (BlendServe, 5.5)"

FULL_REQUESTS, QUICK_REQUESTS = 40_000, 20_000
REPLICAS = (2, 4)
MAX_UNEVEN, MAX_LOST = 0.02, 0.01
RUN_SET, RUN_PROFILE = "batchllm-industry", "a100-80g-qwen2.5-7b"
FULL_SCALE, QUICK_SCALE = 2, 8
"""Factors by which the simulated runs have fewer requests than the set's 8,000, and less memory."""
PAPER_SCALING = {2: 1.89, 4: 3.86}
"""Table 3: 1.85 to 1.93 and 3.78 to 3.88 times one replica's throughput; about the middle is shown."""
MIN_SCALING = {2: 1.93, 4: 3.86}
"""What ours must reach; only the full form has enough requests for a replica's end not to count."""


@dataclass(slots=True, frozen=True)
class Parts:
    """The parts of one pool."""

    uneven: float
    """The furthest that a replica's compute time, memory time or density is from the mean, of the mean."""
    lost: float
    """Fraction of the pool's sharing that no replica can use any more."""
    lost_in_cache: float
    """Fraction not found when each replica runs its dual scan with a cache of its own memory."""
    largest: float
    """Time of the largest request, relative to a replica's equal share of compute or memory time; no part can have
    less."""


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    found: dict[str, dict[int, Parts]] = {}
    for number in TRACES[:1] if quick else TRACES:
        logger.info("trace %d", number)
        pool = pool_with_true_lengths(trace(number, QUICK_REQUESTS if quick else FULL_REQUESTS))
        found[f"trace {number}"] = {replicas: parted(pool, replicas) for replicas in REPLICAS}
    scaling = _scaling(QUICK_SCALE if quick else FULL_SCALE, logger)
    rows = [
        row for name, parts in found.items() for replicas, one in parts.items() for row in _rows(name, replicas, one)
    ]
    for replicas, times in scaling.items():
        holds = None if quick else times >= MIN_SCALING[replicas]
        rows.append(Row(f"{RUN_SET}: {replicas} replicas, simulated", times, PAPER_SCALING[replicas], "x", holds=holds))
    notes = [
        f"{QUICK_REQUESTS if quick else FULL_REQUESTS:,} requests of the traces on {PROFILE}. What a replica's "
        "requests share is counted by their own tree; in a cache, by a model of it alone, one request after another. "
        "Where one request alone is more than a replica's share no parts are even, and that is not judged.",
        f"The runs: {RUN_SET} in BatchLLM's order on {RUN_PROFILE}, 1/{QUICK_SCALE if quick else FULL_SCALE} of its "
        "requests and of the memory; one replica's time over that of the slowest part. The paper's are of its traces.",
    ]
    data = {
        "parts": {
            name: {str(k): [one.uneven, one.lost, one.lost_in_cache] for k, one in parts.items()}
            for name, parts in found.items()
        },
        "scaling": {str(replicas): times for replicas, times in scaling.items()},
    }
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, found))


def _rows(name: str, replicas: int, parts: Parts) -> list[Row]:
    case = f"{name}, {replicas} replicas"
    is_even = None if parts.largest > 1.0 else parts.uneven <= MAX_UNEVEN
    return [
        Row(f"{case}: furthest from equal work and density", 100 * parts.uneven, None, "%", 3, is_even),
        Row(f"{case}: sharing lost", 100 * parts.lost, None, "%", 3, parts.lost < MAX_LOST),
        Row(f"{case}: sharing not found by its order", 100 * parts.lost_in_cache, None, "%", 3),
    ]


def parted(pool: PromptPool, replicas: int) -> Parts:
    ranked = rank(pool.tree, pool.work)
    places = partition(ranked, replicas)
    lengths, outputs = pool.work.prompt_tokens, pool.work.output_tokens
    shared, cached, times = 0, 0, []
    for part in places:
        tree = pool.tree.restricted(ranked.rows[part])
        own = lengths[tree.rows] - tree.new_tokens(lengths[tree.rows])
        compute_s = pool.work.compute_s[tree.rows] * (1.0 - own / (lengths + outputs)[tree.rows])
        times.append((float(compute_s.sum()), float(pool.work.memory_s[tree.rows].sum())))
        shared += int(own.sum())
        cached += _found(pool, dual_scanned(pool, ranked, part))
    columns = np.array(times).T
    columns = np.vstack((columns, columns[0] / columns[1]))
    uneven = float(np.abs(columns / columns.mean(axis=1, keepdims=True) - 1.0).max())
    bound = float(pool.shared_tokens.sum())
    largest = max(float(column.max() / column.sum()) for column in (ranked.compute_s, ranked.memory_s))
    return Parts(uneven, 1.0 - shared / bound, 1.0 - cached / bound, replicas * largest)


def _found(pool: PromptPool, rows: IntArray) -> int:
    found = cached_tokens(pool.tree, pool.work.prompt_tokens, rows, pool.kv_tokens, Eviction.LRU, 16)
    return int(found.sum())


def _scaling(scale: int, logger: logging.Logger) -> dict[int, float]:
    """Speed-up of the slowest replica, by number of replicas."""
    profile = scaled(load_profile(RUN_PROFILE), scale)
    set_ = load_offline(RUN_SET, seed=0, limit=8000 // scale)
    pool = pool_of(set_.requests, profile)
    engine = Engine("fcfs", slots_by_memory(pool))

    def seconds(replicas: int) -> float:
        logger.info("%d replicas, simulated", replicas)
        orders = plan_pool(pool, "batchllm", replicas)
        return max(run_to_the_end(RUN_SET, set_.requests, rows, profile, engine).seconds for rows in orders)

    alone_s = seconds(1)
    return {replicas: alone_s / seconds(replicas) for replicas in REPLICAS}


def _plot(figure: Any, found: dict[str, dict[int, Parts]]) -> None:
    axes = figure.subplots()
    for place, replicas in enumerate(REPLICAS):
        places = [number + 0.4 * place for number in range(len(found))]
        axes.bar(places, [100 * parts[replicas].uneven for parts in found.values()], 0.35, label=f"{replicas} replicas")
    axes.axhline(100 * MAX_UNEVEN, color="k", linestyle=":")
    axes.set_xticks([number + 0.2 for number in range(len(found))], list(found))
    axes.set_ylabel("furthest from equal, %")
    axes.legend()
