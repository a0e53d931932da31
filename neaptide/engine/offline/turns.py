"""Whose turn it is in the offline pool: which lane the next request comes from."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from neaptide.engine.offline.lanes import Lane
from neaptide.engine.offline.sharing.ranking import Ranking, RankingDraft
from neaptide.engine.request import Request

GUARD_S = 600.0
"""After so long a job goes before younger ones, where nothing else keeps it from waiting for ever."""


class Look(ABC):
    """Turns as they would be if what is looked at were handed out. Nothing changes them meanwhile, nor it them."""

    @property
    @abstractmethod
    def first(self) -> Lane | None:
        """The lane that comes next; None without one."""

    @abstractmethod
    def key(self, lane: Lane) -> Any:
        """The lane with the smallest comes next."""

    @abstractmethod
    def drop(self, lane: Lane) -> None:
        """The lane has nothing left."""

    def took(self, lane: Lane, request: Request) -> None:  # noqa: B027 (an order may not care)
        """A request of the lane was looked at."""

    def open_to_a_plan(self, lanes: Collection[Lane]) -> list[Lane]:
        """Lanes whose next row a plan may choose."""
        first = min(map(self.key, lanes))
        return [lane for lane in lanes if self.key(lane) == first]


class Turns(ABC):
    """An order of lanes, which may depend on what was taken from each."""

    @abstractmethod
    def key(self, lane: Lane) -> Any:
        """The lane with the smallest comes next."""

    @abstractmethod
    def look(self) -> Look:
        """To look ahead with."""

    @property
    def rate_tokens_per_s(self) -> float | None:
        """At which offline work was done of late; None if that is not known."""
        return None

    @abstractmethod
    def join(self, lane: Lane) -> None:
        """The lane has got requests."""

    @abstractmethod
    def leave(self, lane: Lane) -> None:
        """The lane has none left that wait."""

    def forget(self, lane: Lane) -> None:  # noqa: B027 (an order may not care)
        """A lane that has left will never come back."""

    def took(self, lane: Lane, request: Request) -> None:  # noqa: B027
        """A request of the lane was handed out."""

    def ended(self, request: Request) -> None:  # noqa: B027
        """A request that was handed out has ended, or one that never was."""

    def set_weights(self, weights: Mapping[str, float]) -> None:  # noqa: B027 (an order may have none)
        """Weights of the tenants from now on; 1 unless given."""

    def begin_step(self, now_s: float, is_paused: bool = False) -> None:  # noqa: B027
        """A step is to be planned; while the operator has paused offline work, what is done of it says nothing of what
        could be."""


class ByDeadline(Turns):
    """Flex requests first, for a caller waits, then jobs by deadline."""

    def __init__(self) -> None:
        self.lanes = Ranking[Lane]()
        self._num_joined = 0

    def key(self, lane: Lane) -> float:
        return lane.deadline_s if lane.is_job else -math.inf

    def look(self) -> "DeadlinesAhead":
        return DeadlinesAhead(self)

    def join(self, lane: Lane) -> None:
        self._num_joined += 1
        self.lanes.place(lane, (self.key(lane), self._num_joined))

    def leave(self, lane: Lane) -> None:
        self.lanes.remove(lane)


class DeadlinesAhead(Look):
    def __init__(self, turns: ByDeadline) -> None:
        self._turns, self._lanes = turns, RankingDraft(turns.lanes)

    @property
    def first(self) -> Lane | None:
        return self._lanes.first

    def key(self, lane: Lane) -> float:
        return self._turns.key(lane)

    def drop(self, lane: Lane) -> None:
        self._lanes.remove(lane)


class ByAge(ByDeadline):
    """The same; but a plan may choose among all jobs, until one has been there for long: no order puts it off for ever.

    Our guard: BatchLLM and BlendServe plan a pool that nothing is added to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.came_s: dict[Lane, float] = {}
        """By the first step that began since."""
        self._new: list[Lane] = []
        self.now_s = 0.0

    def look(self) -> "AgesAhead":
        return AgesAhead(self)

    def join(self, lane: Lane) -> None:
        super().join(lane)
        self.came_s[lane] = math.inf
        self._new.append(lane)

    def leave(self, lane: Lane) -> None:
        super().leave(lane)
        del self.came_s[lane]

    def begin_step(self, now_s: float, is_paused: bool = False) -> None:
        # Not by the step before: an engine without work makes none, and does not know how late it is.
        self.came_s |= {lane: now_s for lane in self._new if lane in self.came_s}
        self._new.clear()
        self.now_s = now_s


class AgesAhead(DeadlinesAhead):
    def __init__(self, turns: ByAge) -> None:
        super().__init__(turns)
        self._came_s, self._now_s = turns.came_s, turns.now_s

    def open_to_a_plan(self, lanes: Collection[Lane]) -> list[Lane]:
        jobs = [lane for lane in lanes if lane.is_job]
        return [lane for lane in jobs if self._came_s[lane] <= self._now_s - GUARD_S] or jobs
