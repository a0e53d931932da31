"""A simulated cluster's replicas, and the placement of its offline rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from neaptide.cluster.autoscaling import DECIDE_S, Scale
from neaptide.cluster.routing import ROUTERS
from neaptide.engine.offline.planning.blend import rank
from neaptide.engine.offline.planning.partition import partition
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.simulation.pools.planned import pool_of

Placement = Literal["claims", "partition"]
MAX_REPLICAS = 1024
"""A limit, because each engine's simulated cache and table take some megabytes."""
PLACEMENTS: tuple[Placement, ...] = ("claims", "partition")


@dataclass(slots=True, frozen=True, kw_only=True)
class SimulatedFleet:
    """A simulated fleet. Raises ValueError if it cannot be simulated."""

    replicas: int = 1
    """Number at the start."""
    router: str = "slack"
    placement: Placement = "claims"
    """Placement of offline rows: replicas lease chunks of one pool, or each has a fixed part of it."""
    lost_at_s: tuple[float, ...] = ()
    """Times at which the replica that has served longest is lost with its work; another one starts."""
    scale: Scale | None = None
    """None: the fleet keeps its size."""
    start_up_s: float = 60.0
    """Time from a replica's start until it serves. The first replicas serve at once."""
    lease_s: float = 15.0
    """Time after a loss until the lost replica's rows can be leased again."""
    decide_s: float = DECIDE_S
    """Time between two decisions on the size."""

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"--replicas must be from 1 to {MAX_REPLICAS}")
        if self.router not in ROUTERS:
            raise ValueError(f"there is no router {self.router!r}; there are: {', '.join(ROUTERS)}")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"there is no placement {self.placement!r}; there are: {', '.join(PLACEMENTS)}")
        if self.placement == "partition" and (self.scale is not None or self.lost_at_s):
            raise ValueError("a replica's part of the pool is lost with it: a fleet that changes needs claims")
        if self.scale is not None and not self.scale.min_replicas <= self.replicas <= self.scale.max_replicas:
            limits = f"{self.scale.min_replicas} to {self.scale.max_replicas}"
            raise ValueError(f"a fleet of {limits} replicas cannot start with {self.replicas}")
        if not (0.0 <= self.start_up_s < math.inf and 0.0 <= self.lease_s < math.inf and self.decide_s > 0.0):
            raise ValueError("times of a fleet must be finite and cannot be negative")


def parted(sets: Sequence[OfflineSet], profile: DeviceProfile, replicas: int) -> list[list[OfflineSet]]:
    """Cuts the sets into the planner's parts of equal work and density, each in the order of the sets. The cut knows
    all lengths.

    Raises ValueError for a set that is submitted in batches.
    """
    if replicas == 1 or not sets:
        return [list(sets)] * replicas
    if any(one.batch_size is not None for one in sets):
        raise ValueError("a set that is submitted in batches keeps one engine busy: replicas cannot share it")
    pool = pool_of([request for one in sets for request in one.requests], profile)
    ranked = rank(pool.tree, pool.work)
    parts = []
    for places in partition(ranked, replicas):
        rows, first, part = set(ranked.rows[places].tolist()), 0, []
        for one in sets:
            requests = [request for k, request in enumerate(one.requests, first) if k in rows]
            part.append(replace(one, requests=requests))
            first += len(one.requests)
        parts.append(part)
    return parts
