"""Simulations next to the server: the recorded traffic, its counterfactual replay, and what-if questions."""

from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from neaptide.server.counterfactual.gauge import CHILD, ReplayPace, ShadowGauge
from neaptide.server.counterfactual.metrics import ShadowMetrics
from neaptide.server.counterfactual.ring import TrafficRing
from neaptide.server.counterfactual.what_if import WhatIfQueries
from neaptide.server.engine_client.client import EngineClient


class Shadow:
    """Owns the simulations of a server. Event loop only.

    Args:
        clock: ``CLOCK_MONOTONIC``.
        temporary: parent of the simulations' temporary files.
    """

    def __init__(
        self,
        client: EngineClient,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        pace: ReplayPace | None = None,
        temporary: Path | None = None,
    ) -> None:
        self.ring = TrafficRing(client, clock)
        self.gauge = ShadowGauge(self.ring, ShadowMetrics(registry), clock, pace, temporary)
        self.desk = WhatIfQueries(self.ring, CHILD, temporary)

    def start(self) -> None:
        self.gauge.start()

    async def stop(self) -> None:
        await self.gauge.stop()
        await self.desk.stop()
