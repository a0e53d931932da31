"""A policy for Ray Serve's autoscaler: the number of replicas, by the rule of other fleets.

Serve's own policy counts the requests that a deployment gets from Serve, but ours get theirs from the gateway. Ray asks
each replica's actor for its values (``said``), and Serve's controller runs the policy (``replicas_wanted``).
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import httpx

from neaptide.cluster.autoscaling import Backlog, Scale, pressure, wanted

ONLINE_LOAD, PRESSURE = "online_load", "pressure"
MOST_PRESSURE = 1e6
"""Replaces infinity, which has no mean."""
ANSWER_S = 5.0
"""Timeout of a server's answer; Ray waits for twice as long."""


class Context(Protocol):
    """The part of Ray's ``AutoscalingContext`` that is used."""

    @property
    def target_num_replicas(self) -> int: ...

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Means of what the replicas reported recently, by name and replica."""
        ...

    @property
    def capacity_adjusted_min_replicas(self) -> int: ...

    @property
    def capacity_adjusted_max_replicas(self) -> int: ...


async def said(server: httpx.AsyncClient) -> dict[str, float]:
    """Autoscaling values that a replica's server reports; empty while either is unknown.

    Args:
        server: client with the server's base URL, and a key if one is required.
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
    """A policy of Ray Serve's autoscaler, which applies its own ``upscale_delay_s`` and ``downscale_delay_s``. Unknown
    values change nothing."""
    told = context.aggregated_metrics or {}
    loads, pressed = told.get(ONLINE_LOAD), told.get(PRESSURE)
    if not loads or not pressed:
        return context.target_num_replicas, {}
    fewest = max(context.capacity_adjusted_min_replicas, 1)
    scale = Scale(fewest, max(context.capacity_adjusted_max_replicas, fewest))
    return wanted(scale, loads.values(), max(pressed.values())), {}
