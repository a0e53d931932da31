"""Decides the number of replicas of a running fleet, by the simulation's rule, from the reports of replicas and their
database."""

import asyncio
import logging
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Gauge

from neaptide.cluster.autoscaling import DECIDE_S, Autoscaler, Scale, Serving, change_to
from neaptide.cluster.gateway.replicas import Replicas, ReplicaStatus

logger = logging.getLogger(__name__)


class Need(NamedTuple):
    """A number of replicas, and those that serve now."""

    desired: int
    serving: list[Serving]


async def needed(autoscaler: Autoscaler, replicas: Replicas, now_s: float) -> Need | None:
    """How many replicas online load and deadlines need; None if the replicas do not say."""
    backlog = await replicas.backlog()
    serving = [
        Serving(replica.name, replica.online_load, replica.since_s)
        for replica in replicas.all
        if replica.state is ReplicaStatus.READY
    ]
    if backlog is None or not serving:
        return None
    return Need(autoscaler.desired(now_s, [one.online_load for one in serving], backlog), serving)


class Resizable(Protocol):
    """A fleet of which the size can change."""

    @property
    def size(self) -> int:
        """Replicas that take work or will."""
        ...

    def grow(self, count: int) -> None: ...

    def shrink(self, name: str) -> None: ...


class Scaling:
    """Scales a fleet; ``run`` decides periodically."""

    def __init__(self, scale: Scale, fleet: Resizable, replicas: Replicas) -> None:
        self._autoscaler = Autoscaler(scale)
        self._fleet = fleet
        self._replicas = replicas

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(DECIDE_S)
            await self.decide(loop.time())

    async def decide(self, now_s: float) -> None:
        """Decides once. Nothing changes while the backlog is unknown: no replica should drain, and a new one could not
        read the batches either."""
        need = await needed(self._autoscaler, self._replicas, now_s)
        if need is None:
            return
        desired, serving = need
        num_starting = max(self._fleet.size - len(serving), 0)
        num_to_start, to_drain = change_to(desired, serving, num_starting)
        if num_to_start or to_drain:
            load = sum(one.online_load for one in serving)
            logger.info("%d replicas are needed, %d exist; online work needs %.2f", desired, self._fleet.size, load)
        self._fleet.grow(num_to_start)
        for name in to_drain:
            self._fleet.shrink(name)


MOST_REPLICAS = 1000
"""Number that is wanted if a batch is late already. Whoever scales has a limit of its own."""


class WantedReplicas:
    """The series by which another program scales the servers; ``run`` updates it periodically."""

    def __init__(self, replicas: Replicas, registry: CollectorRegistry) -> None:
        self._autoscaler = Autoscaler(Scale(max_replicas=MOST_REPLICAS))
        self._replicas = replicas
        self._registry = registry
        self._gauge: Gauge | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.decide(loop.time())
            await asyncio.sleep(DECIDE_S)

    async def decide(self, now_s: float) -> None:
        """Updates the series once. It keeps its value while the need is unknown, and begins when it is first known: an
        autoscaler must not act on a guess."""
        need = await needed(self._autoscaler, self._replicas, now_s)
        if need is None:
            return
        if self._gauge is None:
            self._gauge = Gauge(
                "neaptide_cluster_replicas_wanted",
                "Number of replicas that online load and the deadlines of batches need.",
                registry=self._registry,
            )
        self._gauge.set(need.desired)
