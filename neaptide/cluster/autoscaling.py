"""Decides how many replicas a cluster should have, from the online load and from the deadlines of batches.

The online load of a replica is the share of its time that its chats' targets need. It adds the time of decodes per TPOT
target to the seconds of prompts that arrive in a second. Loads add up, so their sum is a number of replicas. Offline
work runs in the time that is left; the most urgent deadline says how much there must be. Nothing here reads a clock.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DECIDE_S = 10.0
"""Time between two decisions."""


@dataclass(slots=True, frozen=True)
class Scale:
    """Limits of the fleet, as an operator sets them. Raises ValueError for limits that make no sense."""

    min_replicas: int = 1
    max_replicas: int = 8
    online_share: float = 0.6
    """Share of a replica's time that online work may need. The rest is for bursts."""
    offline_efficiency: float = 0.6
    """Lower bound on the time of offline work, by the device's limits, over the time that it really takes."""
    deadline_share: float = 0.8
    """Share of the time left to a deadline in which the work should be done."""
    down_after_s: float = 60.0
    """The fleet shrinks only after a smaller one has been enough for this long."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"a fleet has 1 to N replicas, not {self.min_replicas} to {self.max_replicas}")


@dataclass(slots=True, frozen=True)
class Backlog:
    """Unfinished work of one batch."""

    deadline_s: float
    work_s: float
    """Time of a single replica with nothing else to do."""


def pressure(backlog: Iterable[Backlog], now_s: float, share: float) -> float:
    """Replicas that offline work needs for itself, so that every batch ends within this share of its time.

    Batches run by deadline, so each waits for all that are due before it. Infinite if one is late already.
    """
    most, work_s = 0.0, 0.0
    for job in sorted(backlog, key=lambda one: one.deadline_s):
        work_s += job.work_s
        left_s = share * (job.deadline_s - now_s)
        if work_s > 0.0:
            most = max(most, work_s / left_s if left_s > 0.0 else math.inf)
    return most


def wanted(scale: Scale, online_loads: Iterable[float], pressed: float) -> int:
    """Number of replicas that are enough now.

    Args:
        online_loads: online load of each replica that takes requests.
        pressed: the ``pressure`` of the batches' deadlines.
    """
    online = sum(online_loads)
    needed = max(online / scale.online_share, online + pressed / scale.offline_efficiency)
    if needed >= scale.max_replicas:
        return scale.max_replicas
    return max(math.ceil(needed), scale.min_replicas)


class Serving(NamedTuple):
    """A replica that accepts requests."""

    name: str
    online_load: float
    since_s: float
    """When it began to take requests."""


class ScalingChange(NamedTuple):
    """Replicas to start, and names of replicas to drain."""

    num_to_start: int
    to_drain: list[str]


def change_to(desired: int, serving: Sequence[Serving], num_starting: int) -> ScalingChange:
    """Replicas to start or stop for a fleet of the desired size.

    Replicas with the least online load go first; among equals, the youngest. One serving replica always stays.
    Replicas that are starting are left alone.
    """
    surplus = len(serving) + num_starting - desired
    by_load = sorted(serving, key=lambda one: (one.online_load, -one.since_s))
    going = by_load[: max(min(surplus, len(serving) - 1), 0)]
    return ScalingChange(max(-surplus, 0), [one.name for one in going])


class Autoscaler:
    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._wanted: deque[tuple[float, int]] = deque()
        """Times and wanted sizes of the last ``down_after_s``."""

    def desired(self, now_s: float, online_loads: Sequence[float], backlog: Iterable[Backlog]) -> int:
        """The size from now on: it grows at once, and shrinks to the largest recently wanted size.

        Args:
            online_loads: online load of each replica that takes requests.
        """
        scale = self._scale
        pressed = pressure(backlog, now_s, scale.deadline_share)
        self._wanted.append((now_s, wanted(scale, online_loads, pressed)))
        while self._wanted[0][0] < now_s - scale.down_after_s:
            self._wanted.popleft()
        return max(number for _, number in self._wanted)
