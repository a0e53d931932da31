"""Multi-turn traces on several simulated replicas: which router finds the prefixes, and what a first token waits."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from neaptide.cluster.routing import ROUTERS
from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.cluster.simulation.fleet import SimulatedFleet
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "cluster-routing"
ABOUT = "multi-turn traces on four simulated replicas: prefix hits against one big cache, TTFT against other routers"

PROFILE = "h100-80g-llama-3.1-8b"
REPLICAS = 4
OURS, RIVAL = "slack", "least-load"
MIN_OF_BIG_CACHE = 0.9
MAX_INPUT_TOKENS = 32_768
MAX_OUTPUT_TOKENS = 16
"""Answers are cut there: prompts are what a router moves, and decodes what a simulation's time goes into."""
TTFT_SLO_S, TPOT_SLO_S = 3.0, 0.05
ONE_BIG = "one big replica"
TTFT_ERROR = 1e-9


@dataclass(slots=True, frozen=True)
class Case:
    trace: str
    window_s: tuple[float, float] | None
    speed: float
    """Over all replicas: the recommended load of one, times their number."""


FULL = (
    Case("mooncake_conversation", (0.0, 1200.0), 1.6 * 1.5),
    Case("mooncake_synthetic", None, 1.68 * 1.38),
    Case("agent_miniswe", None, 4.0),
)
QUICK = (Case("mooncake_conversation", (0.0, 120.0), 1.6 * 1.5),)


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    found: dict[str, dict[str, SimResult]] = {}
    notes = []
    for case in QUICK if quick else FULL:
        requests = online_requests(
            case.trace, window_s=case.window_s, speed=case.speed, max_input_tokens=MAX_INPUT_TOKENS
        )
        scenario = _scenario(load_profile(PROFILE), requests)
        runs: dict[str, SimResult] = {}
        found[case.trace] = runs
        for router in ROUTERS:
            logger.info("%s, %s", case.trace, router)
            runs[router] = simulate_cluster(scenario, SimulatedFleet(replicas=REPLICAS, router=router)).result
        logger.info("%s, %s", case.trace, ONE_BIG)
        runs[ONE_BIG] = simulate(replace(scenario, profile=as_one(scenario.profile, REPLICAS))).result
        seconds = requests[-1].arrival_s - requests[0].arrival_s
        notes.append(f"{case.trace}: {len(requests):,} requests in {seconds:,.0f} s.")
    rows = [row for trace, runs in found.items() for row in _rows(trace, runs)]
    notes += [
        f"{REPLICAS} replicas of {PROFILE}, no offline work, prompts up to {MAX_INPUT_TOKENS:,} tokens, answers cut at "
        f"{MAX_OUTPUT_TOKENS}, TTFT {TTFT_SLO_S:g} s, TPOT {1e3 * TPOT_SLO_S:.0f} ms. Replicas report every 0.1 s, and "
        "once a second what they have cached.",
        f"One big replica: the memory and the speed of {REPLICAS}. Its hit ratio is what a router is held against.",
    ]
    data = {
        trace: {name: msgspec.to_builtins(one.online) | {"hits": one.kv.online_hit_ratio} for name, one in runs.items()}
        for trace, runs in found.items()
    }
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, found), against=ONE_BIG)


def as_one(profile: DeviceProfile, devices: int) -> DeviceProfile:
    """One device with the memory and the speed of ``devices`` devices."""
    faster = 1.0 / devices
    costs = {name: cost.scaled((faster,) * 6) for name, cost in profile.costs.items()}
    return msgspec.structs.replace(profile, num_blocks=devices * profile.num_blocks, costs=costs)


def _scenario(profile: DeviceProfile, requests: list[TraceRequest]) -> Scenario:
    return Scenario(
        profile=profile,
        online=requests,
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        max_output_tokens=MAX_OUTPUT_TOKENS,
        with_bounds=False,
    )


def _hits(result: SimResult) -> float:
    return result.kv.online_hit_ratio or 0.0


def _p99_s(result: SimResult) -> float:
    return result.online.ttft_s["p99"] or 0.0


def _rows(trace: str, runs: dict[str, SimResult]) -> list[Row]:
    big, rows = runs[ONE_BIG], list[Row]()
    for name in ROUTERS:
        result, case = runs[name], f"{trace}, {name}"
        is_found = _hits(result) >= MIN_OF_BIG_CACHE * _hits(big) if name == OURS else None
        rows.append(Row(f"{case}: prefix hits", 100 * _hits(result), 100 * _hits(big), "%", 1, is_found))
        is_quick = _p99_s(result) <= _p99_s(runs[RIVAL]) + TTFT_ERROR if name == OURS else None
        rows.append(Row(f"{case}: TTFT p99", 1e3 * _p99_s(result), 1e3 * _p99_s(big), "ms", 0, is_quick))
        attained = 100 * (result.online.attainment["both"] or 0.0)
        rows.append(Row(f"{case}: attainment", attained, 100 * (big.online.attainment["both"] or 0.0), "%", 1))
    return rows


def _plot(figure: Any, found: dict[str, dict[str, SimResult]]) -> None:
    for axes, (trace, runs) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for name, result in runs.items():
            axes.plot(100 * _hits(result), 1e3 * _p99_s(result), "o", label=name)
        axes.set_title(trace)
        axes.set_xlabel("prefix hits, %")
        axes.set_ylabel("TTFT p99, ms")
    axes.legend()
