"""Size of a cluster: the number of replicas that online work and the pool's deadlines need.

A replica's online load is the share of its time that its targets need: its decodes within the TPOT target, and its
prompts per second. The sum of the loads is the number of replicas that online work fills. Offline work runs in the
rest; the most urgent deadline determines how much of it there must be. Time is an argument everywhere.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DECIDE_S = 10.0
"""Interval between decisions on the size."""


@dataclass(slots=True, frozen=True)
class Scale:
    """Limits and targets that an operator sets. Raises ValueError for an impossible fleet."""

    min_replicas: int = 1
    max_replicas: int = 8
    online_share: float = 0.6
    """Share of a replica's time for online work; the rest absorbs uneven arrivals."""
    offline_efficiency: float = 0.6
    """Least time of rows by the device's limits, divided by their real time."""
    deadline_share: float = 0.8
    """Share of the time until a deadline within which its work should be done."""
    down_after_s: float = 60.0
    """Time for which a smaller fleet must have been enough before replicas are drained."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"a fleet has 1 to N replicas, not {self.min_replicas} to {self.max_replicas}")


@dataclass(slots=True, frozen=True)
class Backlog:
    """Unfinished rows of one job."""

    deadline_s: float
    work_s: float
    """Time that one idle replica would need for them."""


def pressure(backlog: Iterable[Backlog], now_s: float, share: float) -> float:
    """Number of replicas that must do nothing but offline work for every job to finish within this share of its time.

    Infinite if a deadline has passed. Jobs run by deadline, so each waits for all that are due before it.
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
        online_loads: one per replica that accepts requests.
        pressed: ``pressure`` of the batches' deadlines.
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
    """Time when it began to accept them."""


class Change(NamedTuple):
    """Replicas of a fleet to start and to drain."""

    num_to_start: int
    to_drain: list[str]


def change_to(desired: int, serving: Sequence[Serving], num_starting: int) -> Change:
    """The change that leads to the desired fleet.

    Replicas with the least online work are drained, of equals the youngest. At least one stays, and starting replicas
    are not stopped.
    """
    surplus = len(serving) + num_starting - desired
    by_load = sorted(serving, key=lambda one: (one.online_load, -one.since_s))
    going = by_load[: max(min(surplus, len(serving) - 1), 0)]
    return Change(max(-surplus, 0), [one.name for one in going])


class Autoscaler:
    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._wanted: deque[tuple[float, int]] = deque()
        """Time and wanted number of each decision in the last ``down_after_s``."""

    def desired(self, now_s: float, online_loads: Sequence[float], backlog: Iterable[Backlog]) -> int:
        """Desired number of replicas. It rises at once, and falls to the maximum of the last ``down_after_s``.

        Args:
            online_loads: one per replica that accepts requests.
        """
        scale = self._scale
        pressed = pressure(backlog, now_s, scale.deadline_share)
        self._wanted.append((now_s, wanted(scale, online_loads, pressed)))
        while self._wanted[0][0] < now_s - scale.down_after_s:
            self._wanted.popleft()
        return max(number for _, number in self._wanted)
