"""One pool on 1 to 64 simulated replicas: how much faster it is done, and how much of its sharing is lost."""

import logging
from dataclasses import replace
from typing import Any

from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.cluster.simulation.fleet import PLACEMENTS, Placement, SimulatedFleet
from neaptide.cluster.simulation.result import ClusterResult
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.simulation.scenario import Scenario
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "cluster-scaling"
ABOUT = "throughput of one offline pool on 1 to 64 simulated replicas, by the planner's parts and by claims"

PROFILE = "a100-40g-llama-3.1-8b"
POOL = "batchllm-2048-2048-s16"
FULL_ROWS, FULL_REPLICAS = 12_800, (1, 4, 16, 64)
QUICK_ROWS, QUICK_REPLICAS = 2_048, (1, 8)
"""256 or 200 rows for each of the most replicas."""
MIN_SCALING, MAX_LOST = 0.95, 0.02
JUDGED: Placement = "partition"
FOR_EVER_S = 1e9


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    num_rows, sizes = (QUICK_ROWS, QUICK_REPLICAS) if quick else (FULL_ROWS, FULL_REPLICAS)
    pool = _pool(num_rows)
    bound = pool.sharing(load_profile(PROFILE).block_size).ratio
    found: dict[Placement, dict[int, ClusterResult]] = {}
    for placement in PLACEMENTS:
        found[placement] = {}
        for replicas in sizes if placement == JUDGED else sizes[1:]:
            logger.info("%s, %d replicas", placement, replicas)
            found[placement][replicas] = simulate_cluster(
                _scenario(pool), SimulatedFleet(replicas=replicas, placement=placement)
            ).result
    alone = found[JUDGED][1]
    rows = [row for placement in PLACEMENTS for row in _rows(placement, found[placement], alone, bound)]
    notes = [
        f"{num_rows:,} rows of {POOL} on {PROFILE}: 16 rows each on prefixes of 2,048 tokens, answers of 100. One "
        f"pool for every number of replicas, so {num_rows // sizes[-1]} rows for each of {sizes[-1]}, whose last "
        "answers are in the time. Linear is one replica's time over theirs.",
        "Partition: the planner's parts of equal work and density. Claims: chunks of 64 to 256 rows of one pool, "
        "which is coarse where a replica has but a few of them. Only the parts are judged.",
    ]
    data = {
        "bound": bound,
        "runs": {
            placement: {str(n): [_seconds(result), result.kv.saving_ratio] for n, result in runs.items()}
            for placement, runs in found.items()
        },
    }
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, found, alone))


def _pool(num_rows: int) -> OfflineSet:
    """The set, and copies with other contents until there are ``num_rows`` rows."""
    base = load_offline(POOL, seed=0, limit=num_rows)
    generations = range(1, -(-num_rows // len(base.requests)))
    requests = [*base.requests, *(request for number in generations for request in base.refill(number).requests)]
    return replace(base, requests=requests[:num_rows])


def _scenario(pool: OfflineSet) -> Scenario:
    return Scenario(
        profile=load_profile(PROFILE), offline=[pool], refill=False, window_s=(0.0, FOR_EVER_S), with_bounds=False
    )


def _seconds(result: ClusterResult) -> float:
    return result.offline.makespan_s or FOR_EVER_S


def _rows(placement: Placement, runs: dict[int, ClusterResult], alone: ClusterResult, bound: float) -> list[Row]:
    rows = []
    for replicas, result in runs.items():
        case, is_judged = f"{placement}, {replicas} replicas", placement == JUDGED and replicas > 1
        if replicas > 1:
            share = _seconds(alone) / _seconds(result) / replicas
            rows.append(Row(f"{case}: of linear", share, digits=3, holds=share >= MIN_SCALING if is_judged else None))
        lost = 1.0 - (result.kv.saving_ratio or 0.0) / bound
        rows.append(Row(f"{case}: sharing lost", 100 * lost, None, "%", 2, lost < MAX_LOST if is_judged else None))
    return rows


def _plot(figure: Any, found: dict[Placement, dict[int, ClusterResult]], alone: ClusterResult) -> None:
    axes = figure.subplots()
    for placement, runs in found.items():
        axes.plot(list(runs), [_seconds(alone) / _seconds(one) for one in runs.values()], "o-", label=placement)
    most = max(found[JUDGED])
    axes.plot((1, most), (1, most), "k:", label="linear")
    axes.set_xlabel("replicas")
    axes.set_ylabel("throughput over one replica")
    axes.legend()
