"""How many replicas Ray Serve is to have: a policy for its autoscaler, by the rule that other fleets have.

Serve's own policy counts the requests that a deployment has been given, and ours get theirs past Serve. Each replica
says what it knows (``said``) when Ray asks its actor; the policy (``replicas_wanted``) is run by Serve's controller.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import httpx

from neaptide.cluster.autoscaling import Backlog, Scale, pressure, wanted

ONLINE_LOAD, PRESSURE = "online_load", "pressure"
MOST_PRESSURE = 1e6
"""In place of infinity, which has no mean."""
ANSWER_S = 5.0
"""For what a server says of itself; Ray waits for twice as long."""


class Context(Protocol):
    """What of Ray's ``AutoscalingContext`` counts here."""

    @property
    def target_num_replicas(self) -> int: ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """By name and replica: means of what the replicas said of late."""
        ...

    @property
    def capacity_adjusted_min_replicas(self) -> int: ...

    @property
    def capacity_adjusted_max_replicas(self) -> int: ...


async def said(server: httpx.AsyncClient) -> dict[str, float]:
    """What its own server tells a replica; blank while it does not know either of both.

    Args:
        server: its base URL is the server's, its headers have a key where one is required.
    """
    try:
        figures, backlog = await asyncio.gather(
            server.get("/figures", timeout=ANSWER_S), server.get("/backlog", timeout=ANSWER_S)
        )
        jobs = backlog.raise_for_status().json()["jobs"]
        online_load = float(figures.raise_for_status().json()["online_load"])
    except httpx.HTTPError:
        return {}
    pressed = pressure((Backlog(one["left_seconds"], one["work_seconds"]) for one in jobs), 0.0, Scale().deadline_share)
    return {ONLINE_LOAD: online_load, PRESSURE: min(pressed, MOST_PRESSURE)}


def replicas_wanted(context: Context) -> tuple[int, dict[str, Any]]:
    """A policy of Ray Serve's autoscaler, which waits by its own ``upscale_delay_s`` and ``downscale_delay_s``. Unknown
    means no change."""
    told = context.aggregated_metrics or {}
    loads, pressed = told.get(ONLINE_LOAD), told.get(PRESSURE)
    if not loads or not pressed:
        return context.target_num_replicas, {}
    fewest = max(context.capacity_adjusted_min_replicas, 1)
    scale = Scale(fewest, max(context.capacity_adjusted_max_replicas, fewest))
    return wanted(scale, loads.values(), max(pressed.values())), {}
