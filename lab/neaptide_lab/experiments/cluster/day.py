"""A day of chats and batches on a simulated cluster that grows and shrinks, and loses a replica at noon."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from neaptide.cluster.autoscaling import Scale
from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.cluster.simulation.fleet import SimulatedFleet
from neaptide.cluster.simulation.result import ClusterResult
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.loadgen.workloads.online_sets import DAY_S, online_requests
from neaptide.simulation.scenario import Scenario
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "cluster-day"
ABOUT = "a day with batches on an autoscaled simulated cluster, a replica lost at noon, against a fleet of fixed size"

PROFILE = "a100-40g-llama-3.1-8b"
CURVE = "echo-day"
POOL = "batchllm-1024-2048-s16"
PEAK_REPLICAS = 4
"""The fleet of fixed size, and the most that the other may have."""
TTFT_SLO_S, TPOT_SLO_S = 2.0, 0.1
CONTEXT_TOKENS = 16_384
JOBS_AT = (0.0, 0.25, 0.5, 0.75)
"""Submission times as fractions of the day; each job is due ``DEADLINE`` later."""
DEADLINE, NOON = 0.25, 0.5
START_UP = 1 / 144
"""Ten minutes: what a replica takes to start, for against a ramp it is what counts how long that is of a day."""
CONCEDED = 0.01
FIXED, FIXED_LOSS, SCALED = "fixed fleet", "fixed fleet, a replica lost", "autoscaled, a replica lost"


@dataclass(slots=True, frozen=True)
class Size:
    """Size of the simulated day. Time is compressed by a factor; requests keep their lengths and their targets."""

    speed: float
    requests_per_s: float
    """While simulated, on average."""
    rows: int
    """Rows of each job."""

    @property
    def day_s(self) -> float:
        return DAY_S / self.speed


FULL = Size(20.0, 2.4, 3600)
QUICK = Size(240.0, 2.4, 300)


def run(quick: bool) -> ExperimentResult:
    logger, size = logging.getLogger(__name__), QUICK if quick else FULL
    scenario, day_s = _scenario(size), size.day_s
    fixed = SimulatedFleet(replicas=PEAK_REPLICAS, start_up_s=START_UP * day_s, lease_s=15.0)
    scale = Scale(1, PEAK_REPLICAS, down_after_s=day_s / 24)
    fleets = {
        FIXED: fixed,
        FIXED_LOSS: replace(fixed, lost_at_s=(NOON * day_s,)),
        SCALED: replace(fixed, replicas=2, lost_at_s=(NOON * day_s,), scale=scale, decide_s=day_s / 288),
    }
    found = {}
    for name, fleet in fleets.items():
        logger.info("%s", name)
        found[name] = simulate_cluster(scenario, fleet).result
    rows = [row for name, result in found.items() for row in _rows(name, result, found[FIXED], size)]
    notes = [
        f"{CURVE} at {size.speed:g} times its speed, {len(scenario.online):,} chats with the lengths of ShareGPT, and "
        f"{len(JOBS_AT)} jobs of {size.rows:,} rows ({POOL}), each due a quarter of a day after it came; {PROFILE}, "
        f"TTFT {TTFT_SLO_S:g} s, TPOT {1e3 * TPOT_SLO_S:.0f} ms.",
        f"A replica takes {START_UP * day_s:.1f} s to start, ten minutes of this day: ramps are as much steeper than "
        f"real ones as the day is shorter. What a lost replica had claimed waits for {fixed.lease_s:g} s.",
        "Attainment counts requests that were lost with their replica as missed. Replica hours are the day's.",
    ]
    data = {name: _numbers(result) for name, result in found.items()}
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, found, size))


def _scenario(size: Size) -> Scenario:
    base = load_offline(POOL, seed=0, limit=size.rows)
    jobs = []
    for number, at in enumerate(JOBS_AT):
        one = base.refill(number) if number else base
        jobs.append(replace(one, requests=[replace(r, arrival_s=at * size.day_s) for r in one.requests]))
    return Scenario(
        profile=load_profile(PROFILE),
        online=online_requests(f"{CURVE}@{size.requests_per_s / size.speed}", seed=0, speed=size.speed),
        offline=[OfflineSet(POOL, [r for one in jobs for r in one.requests], synthetic=True)],
        offline_deadline_s=DEADLINE * size.day_s,
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        max_model_len=CONTEXT_TOKENS,
        window_s=(0.0, size.day_s),
        with_bounds=False,
    )


def _attained(result: ClusterResult) -> float:
    return result.online.attainment["both"] or 0.0


def _hours(result: ClusterResult, size: Size) -> float:
    return result.replica_hours * size.speed


def _rows(name: str, result: ClusterResult, fixed: ClusterResult, size: Size) -> list[Row]:
    is_ours = name == SCALED
    keeps_up = _attained(result) >= _attained(fixed) - CONCEDED
    hours, saved = _hours(result, size), 1.0 - _hours(result, size) / _hours(fixed, size)
    failed, missed, left = result.failed_online, result.offline.deadline_misses, result.rows.open
    rows = [
        Row(f"{name}: attainment", 100 * _attained(result), unit="%", holds=keeps_up if is_ours else None),
        Row(f"{name}: chats lost with a replica", failed, digits=0),
        Row(f"{name}: rows past their deadline", missed, digits=0, holds=missed == 0 if is_ours else None),
        Row(f"{name}: rows left", left, digits=0, holds=left == 0 if is_ours else None),
        Row(f"{name}: replica hours", hours, digits=1),
    ]
    if is_ours:
        rows.append(Row(f"{name}: replica hours saved", 100 * saved, unit="%", digits=1))
    return rows


def _numbers(result: ClusterResult) -> dict[str, Any]:
    return {
        "online": msgspec.to_builtins(result.online),
        "offline": msgspec.to_builtins(result.offline),
        "rows": msgspec.to_builtins(result.rows),
        "replica_hours": result.replica_hours,
        "failed_online": result.failed_online,
        "sizes": result.sizes,
    }


def _plot(figure: Any, found: dict[str, ClusterResult], size: Size) -> None:
    axes = figure.subplots()
    for name, result in found.items():
        hours = [24.0 * at_s / size.day_s for at_s, _ in result.sizes]
        axes.step([*hours, 24.0], [*(n for _, n in result.sizes), result.sizes[-1][1]], where="post", label=name)
    axes.set_xlabel("hour of the day")
    axes.set_ylabel("replicas")
    axes.legend()
