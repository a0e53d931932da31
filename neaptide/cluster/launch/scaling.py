"""Decides the number of replicas of a running fleet, by the simulation's rule, from the reports of replicas and their
database."""

import asyncio
import logging
from typing import Protocol

from neaptide.cluster.autoscaling import DECIDE_S, Autoscaler, Scale, Serving, change_to
from neaptide.cluster.gateway.replicas import Replicas, ReplicaStatus

logger = logging.getLogger(__name__)


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
        backlog = await self._replicas.backlog()
        serving = [
            Serving(replica.name, replica.online_load, replica.since_s)
            for replica in self._replicas.all
            if replica.state is ReplicaStatus.READY
        ]
        if backlog is None or not serving:
            return
        desired = self._autoscaler.desired(now_s, [one.online_load for one in serving], backlog)
        num_starting = max(self._fleet.size - len(serving), 0)
        num_to_start, to_drain = change_to(desired, serving, num_starting)
        if num_to_start or to_drain:
            load = sum(one.online_load for one in serving)
            logger.info("%d replicas are needed, %d exist; online work needs %.2f", desired, self._fleet.size, load)
        self._fleet.grow(num_to_start)
        for name in to_drain:
            self._fleet.shrink(name)
