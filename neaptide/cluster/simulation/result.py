"""The result of a simulation of several replicas."""

from dataclasses import dataclass

import msgspec

from neaptide.simulation.result import KvResult, OfflineResult, OnlineResult, SimResult
from neaptide.simulation.simulator import Run


class ReplicaResult(msgspec.Struct, kw_only=True):
    name: str
    state: str
    """State at the end of the run."""
    begins_s: float
    ready_s: float
    """Time from which it served."""
    ended_s: float | None
    """Time at which it was stopped or lost."""
    steps: int
    online: OnlineResult
    offline: OfflineResult
    kv: KvResult


class RowsResult(msgspec.Struct, kw_only=True):
    """Offline rows that have arrived, on all replicas."""

    done: int
    open: int
    given_back: int
    """Rows that a replica leased, did not finish and returned."""


class ClusterResult(SimResult, kw_only=True):
    """The figures of all replicas together, as if they were one engine, and of each replica."""

    placement: str
    router: str
    replica_hours: float
    """Time from start to stop, including the start-up."""
    failed_online: int
    """Requests that were lost with their replica; they count as missed."""
    rows: RowsResult
    replicas: list[ReplicaResult]
    sizes: list[tuple[float, int]]
    """Times, each with the number of running replicas from then on, starting ones included."""


@dataclass(slots=True)
class ClusterRun:
    """A finished simulation of a cluster."""

    result: ClusterResult
    whole: Run
    """All replicas as one; its result is ``result``."""
