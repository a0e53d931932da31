"""BlendServe's table 3: one pool on one, two and four devices, each part run by itself."""

import logging
from dataclasses import replace
from typing import Any

from neaptide.engine.offline.planning.blend import rank
from neaptide.engine.offline.planning.partition import partition
from neaptide.loadgen.workloads.blend_sets import TRACE_TARGETS
from neaptide.simulation.pools.planned import pool_of
from neaptide_lab.experiments.blend.pools import Mix, Size
from neaptide_lab.experiments.blend.runs import BlendCase
from neaptide_lab.experiments.blend.setting import PROFILE, QUICK, TRACES, profile
from neaptide_lab.experiments.blend.tables import describe
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-dp"
ABOUT = "throughput of one pool on two and four devices over that on one (BlendServe, table 3)"

REPLICAS = (1, 2, 4)
WAYS = ("blendserve", "neaptide")
PAPER = {1: {2: 1.85, 4: 3.78}, 2: {2: 1.93, 4: 3.86}, 3: {2: 1.85, 4: 3.81}, 4: {2: 1.93, 4: 3.88}}
"""By trace and devices."""
MIN_SCALING = 3.86
"""At four devices; the best of the paper's but one."""


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    replicas = REPLICAS[:2] if quick else REPLICAS
    size = Size(QUICK.shrink, QUICK.lasting * replicas[-1])
    found: dict[str, dict[str, dict[int, float]]] = {}
    rows = []
    for number in TRACES[:1] if quick else TRACES:
        whole = BlendCase.of(Mix(*TRACE_TARGETS[number]), size, profile())
        times = {way: {count: _slowest_s(whole, count, way, logger) for count in replicas} for way in WAYS}
        found[f"trace {number}"] = times
        for way, seconds in times.items():
            for count in replicas[1:]:
                scaling = seconds[1] / seconds[count]
                is_judged = way == "neaptide" and count == REPLICAS[-1]
                paper = PAPER[number][count] if way == "blendserve" else None
                holds = scaling >= MIN_SCALING if is_judged else None
                rows.append(Row(f"trace {number}, {count} devices: {way}", scaling, paper, "x", 2, holds))
    notes = [
        describe(size, PROFILE),
        "The pool is cut into parts of equal work and density, each runs on a device of its own, and the slowest part "
        "tells. Lengths are known to the cut, as those of a sample are to each part's plan.",
    ]
    data = {
        name: {way: {str(k): s for k, s in seconds.items()} for way, seconds in times.items()}
        for name, times in found.items()
    }
    return ExperimentResult(NAME, rows, notes, {"seconds": data}, lambda figure: _plot(figure, found))


def _slowest_s(whole: BlendCase, replicas: int, way: str, logger: logging.Logger) -> float:
    logger.info("%s, %d devices, %s", whole.name, replicas, way)
    if replicas == 1:
        return whole.ran(way).seconds
    pool = pool_of(whole.requests, whole.profile)
    ranked = rank(pool.tree, pool.work)
    parts = [ranked.rows[places].tolist() for places in partition(ranked, replicas)]
    return max(
        replace(whole, requests=[whole.requests[row] for row in sorted(rows)]).ran(way).seconds for rows in parts
    )


def _plot(figure: Any, found: dict[str, dict[str, dict[int, float]]]) -> None:
    axes = figure.subplots()
    for name, times in found.items():
        for way, seconds in times.items():
            axes.plot(list(seconds), [seconds[1] / one for one in seconds.values()], "o-", label=f"{name}, {way}")
    axes.plot(REPLICAS, REPLICAS, "k:")
    axes.set_xlabel("devices")
    axes.set_ylabel("throughput over one device")
    axes.legend()
