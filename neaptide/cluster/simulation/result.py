"""What a simulation of several replicas gives."""

from dataclasses import dataclass

import msgspec

from neaptide.simulation.result import KvResult, OfflineResult, OnlineResult, SimResult
from neaptide.simulation.simulator import Run


class ReplicaResult(msgspec.Struct, kw_only=True):
    name: str
    state: str
    """At the end of the run."""
    begins_s: float
    ready_s: float
    """When it began to serve."""
    ended_s: float | None
    """When it was stopped or lost."""
    steps: int
    online: OnlineResult
    offline: OfflineResult
    kv: KvResult


class RowsResult(msgspec.Struct, kw_only=True):
    """Of the offline rows that have come, wherever they were done."""

    done: int
    open: int
    given_back: int
    """Claimed by a replica that did not do them, and claimed again."""


class ClusterResult(SimResult, kw_only=True):
    """The figures of all replicas together, as if they were one engine, and of each."""

    placement: str
    router: str
    replica_hours: float
    """From start to stop, the time to start included."""
    failed_online: int
    """Requests that were lost with their replica; they count as missed."""
    rows: RowsResult
    replicas: list[ReplicaResult]
    sizes: list[tuple[float, int]]
    """Replicas that have been started and not stopped, from when on."""


@dataclass(slots=True)
class ClusterRun:
    """A simulation of a cluster that is over."""

    result: ClusterResult
    whole: Run
    """All replicas as one; its result is ``result``."""
