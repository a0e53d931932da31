"""How many replicas a cluster should have: by what online work needs, and by what the pool's deadlines ask for.

A replica's online load is the share of its time that its chats' targets need: what their decodes take of every TPOT
target, and the seconds of prompts that come in a second. Loads add up, so their sum says how many replicas they would
fill. Offline work runs in what is left; the deadline that presses most says how much of that must be there. Nothing
here reads a clock.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

DECIDE_S = 10.0
"""Between two decisions on the size."""


@dataclass(slots=True, frozen=True)
class Scale:
    """What an operator sets. Raises ValueError for a fleet that cannot be."""

    min_replicas: int = 1
    max_replicas: int = 8
    online_share: float = 0.6
    """Of a replica's time that online work may need: the rest is for what comes unevenly."""
    offline_efficiency: float = 0.6
    """Of the least time that rows take by a device's limits, over what they really take."""
    deadline_share: float = 0.8
    """Of the time that is left to a deadline, in which its work should be done."""
    down_after_s: float = 60.0
    """A smaller fleet must have been enough for so long."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"a fleet has 1 to N replicas, not {self.min_replicas} to {self.max_replicas}")


@dataclass(slots=True, frozen=True)
class Backlog:
    """Rows of one job that are not done."""

    deadline_s: float
    work_s: float
    """Of one replica with nothing else to do."""


def pressure(backlog: Iterable[Backlog], now_s: float, share: float) -> float:
    """Replicas that must do nothing else from now on for every job to be done within this share of its time; infinite
    if one is late already. Jobs are done by deadline, so each waits for all that are due before it."""
    most, work_s = 0.0, 0.0
    for job in sorted(backlog, key=lambda one: one.deadline_s):
        work_s += job.work_s
        left_s = share * (job.deadline_s - now_s)
        if work_s > 0.0:
            most = max(most, work_s / left_s if left_s > 0.0 else math.inf)
    return most


def wanted(scale: Scale, online_loads: Iterable[float], pressed: float) -> int:
    """Replicas that are enough at this moment.

    Args:
        online_loads: of each replica that takes requests.
        pressed: the ``pressure`` of the batches' deadlines.
    """
    online = sum(online_loads)
    needed = max(online / scale.online_share, online + pressed / scale.offline_efficiency)
    if needed >= scale.max_replicas:
        return scale.max_replicas
    return max(math.ceil(needed), scale.min_replicas)


class Serving(NamedTuple):
    """A replica that takes requests."""

    name: str
    online_load: float
    since_s: float
    """When it began to."""


class Change(NamedTuple):
    """Of a fleet."""

    num_to_start: int
    to_drain: list[str]


def change_to(desired: int, serving: Sequence[Serving], num_starting: int) -> Change:
    """What makes a fleet the desired one. Those with the least online work go, of equals the youngest; one that serves
    stays in any case, and replicas that start are let."""
    surplus = len(serving) + num_starting - desired
    by_load = sorted(serving, key=lambda one: (one.online_load, -one.since_s))
    going = by_load[: max(min(surplus, len(serving) - 1), 0)]
    return Change(max(-surplus, 0), [one.name for one in going])


class Autoscaler:
    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._wanted: deque[tuple[float, int]] = deque()
        """When how many were wanted, since the smaller fleet has to have been enough."""

    def desired(self, now_s: float, online_loads: Sequence[float], backlog: Iterable[Backlog]) -> int:
        """Replicas from now on: up at once, down to the most that was wanted of late.

        Args:
            online_loads: of each replica that takes requests.
        """
        scale = self._scale
        pressed = pressure(backlog, now_s, scale.deadline_share)
        self._wanted.append((now_s, wanted(scale, online_loads, pressed)))
        while self._wanted[0][0] < now_s - scale.down_after_s:
            self._wanted.popleft()
        return max(number for _, number in self._wanted)
