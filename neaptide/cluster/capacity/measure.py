"""Simulates the replicas of one size under one part of the trace, and counts them together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from neaptide.cluster.capacity.stretch import Stretch
from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.cluster.simulation.fleet import SimulatedFleet
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.result import OnlineResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress, Run, simulate

TARGETS = ("ttft", "tpot", "both")


@dataclass(slots=True, frozen=True)
class Size:
    replicas: int
    num_blocks: int
    """KV blocks of each replica, in the profile's block size."""

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario with the memory of one replica."""
        profile = msgspec.structs.replace(scenario.profile, num_blocks=self.num_blocks)
        return replace(scenario, profile=profile)


@dataclass(slots=True, frozen=True)
class MeasuredSize:
    attainment: dict[str, float]
    """For all requests that arrived in the window; 0 without any."""
    too_large: int
    """Requests among them that exceed a replica's memory: never submitted, and missed."""
    offline_tokens_per_s: float
    """For all replicas."""
    valid: bool


def measure(
    base: Scenario,
    stretch: Stretch,
    size: Size,
    offline: Sequence[OfflineSet] = (),
    on_progress: OnProgress | None = None,
) -> MeasuredSize:
    """Simulates a size. Several replicas are behind the slack router and lease rows from one pool of the
    offline sets."""
    scenario = size.of(base)
    fitting = [r for r in stretch.requests if _tokens(r) <= scenario.max_tokens]
    too_large = sum(_is_inside(r, stretch) and _tokens(r) > scenario.max_tokens for r in stretch.requests)
    met, submitted, tokens_per_s, valid = dict.fromkeys(TARGETS, 0), 0, 0.0, True
    if fitting or offline:
        scenario = replace(
            scenario, online=fitting, offline=offline, window_s=stretch.window_s, drain_s=_last_due_s(base, fitting)
        )
        result = _run(scenario, size.replicas, on_progress).result
        met = {name: _count(result.online, name) for name in TARGETS}
        submitted, tokens_per_s, valid = result.online.requests, result.offline.tokens_per_s or 0.0, result.valid
    attainment = {name: count / max(submitted + too_large, 1) for name, count in met.items()}
    return MeasuredSize(attainment, too_large, tokens_per_s, valid)


def _run(scenario: Scenario, replicas: int, on_progress: OnProgress | None) -> Run:
    if replicas == 1:
        return simulate(scenario, on_progress=on_progress)
    return simulate_cluster(scenario, SimulatedFleet(replicas=replicas), on_progress=on_progress).whole


def _tokens(request: TraceRequest) -> int:
    return request.input_tokens + request.output_tokens


def _is_inside(request: TraceRequest, stretch: Stretch) -> bool:
    return stretch.window_s[0] <= request.arrival_s <= stretch.window_s[1]


def _count(result: OnlineResult, name: str) -> int:
    return round((result.attainment[name] or 0.0) * result.requests)


def _last_due_s(scenario: Scenario, requests: Sequence[TraceRequest]) -> float:
    """Time after the last arrival by which every request has met or missed its targets."""
    longest = max((request.output_tokens for request in requests), default=0)
    return scenario.ttft_slo_s + longest * scenario.tpot_slo_s
