"""One size under one stretch of the trace: its replicas are simulated one by one, and counted together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.capacity.stretch import Stretch
from neaptide.simulation.result import OnlineResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress, simulate

TARGETS = ("ttft", "tpot", "both")


@dataclass(slots=True, frozen=True)
class Size:
    replicas: int
    num_blocks: int
    """KV blocks of each replica, of the profile's size."""

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario with as much memory as one replica has."""
        profile = msgspec.structs.replace(scenario.profile, num_blocks=self.num_blocks)
        return replace(scenario, profile=profile)


@dataclass(slots=True, frozen=True)
class Measured:
    attainment: dict[str, float]
    """Of all requests that arrived in the window."""
    too_large: int
    """Requests among them that the memory of a replica does not hold whole: never submitted, and missed."""
    offline_tokens_per_s: float
    """Of all replicas."""
    valid: bool


def measure(
    base: Scenario,
    stretch: Stretch,
    size: Size,
    offline: Sequence[OfflineSet] = (),
    on_progress: OnProgress | None = None,
) -> Measured:
    """Request k of the stretch, in the order of arrival, goes to replica k modulo their number. Every replica has a
    pool of its own, with the whole of the offline sets in it."""
    scenario = replace(size.of(base), offline=offline, window_s=stretch.window_s)
    met = dict.fromkeys(TARGETS, 0)
    submitted = too_large = 0
    tokens_per_s, valid = 0.0, True
    for replica in range(size.replicas):
        routed = stretch.requests[replica :: size.replicas]
        fitting = [r for r in routed if _tokens(r) <= scenario.max_tokens]
        too_large += sum(_is_inside(r, stretch) and _tokens(r) > scenario.max_tokens for r in routed)
        if not fitting and not offline:
            continue
        one = replace(scenario, online=fitting, seed=base.seed + replica, drain_s=_last_due_s(base, fitting))
        result = simulate(one, on_progress=_part(on_progress, replica, size.replicas)).result
        submitted += result.online.requests
        for name in TARGETS:
            met[name] += _count(result.online, name)
        tokens_per_s += result.offline.tokens_per_s or 0.0
        valid = valid and result.valid
    attainment = {name: count / (submitted + too_large) for name, count in met.items()}
    return Measured(attainment, too_large, tokens_per_s, valid)


def _tokens(request: TraceRequest) -> int:
    return request.input_tokens + request.output_tokens


def _is_inside(request: TraceRequest, stretch: Stretch) -> bool:
    return stretch.window_s[0] <= request.arrival_s <= stretch.window_s[1]


def _count(result: OnlineResult, name: str) -> int:
    return round((result.attainment[name] or 0.0) * result.requests)


def _last_due_s(scenario: Scenario, requests: Sequence[TraceRequest]) -> float:
    """After the last arrival: a request that is not done by then has missed a target already."""
    longest = max((request.output_tokens for request in requests), default=0)
    return scenario.ttft_slo_s + longest * scenario.tpot_slo_s


def _part(on_progress: OnProgress | None, replica: int, replicas: int) -> OnProgress | None:
    """Of all replicas; the end of a run, after the last arrival, is not told apart."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(replica + min(done / total, 1.0) if total else replica, replicas)
