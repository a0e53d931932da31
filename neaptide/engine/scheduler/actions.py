"""Actions of a draft, in order, which ``Scheduler.apply`` executes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.draft import PrefixHit
from neaptide.engine.request import Request


@dataclass(slots=True, frozen=True)
class Preempt:
    """Preempts a request: it loses its KV and waits again."""

    request: Request


@dataclass(slots=True, frozen=True)
class Grow:
    """Allocates blocks for ``num_tokens`` more tokens, whether or not the request is scheduled."""

    request: Request
    num_tokens: int


@dataclass(slots=True, frozen=True)
class Admit:
    """Admits a request: it leaves the queue and gets a slot and its cached prefix."""

    request: Request
    hit: PrefixHit


@dataclass(slots=True, frozen=True)
class Schedule:
    """Schedules ``num_tokens`` tokens of a request."""

    request: Request
    num_tokens: int


class ScheduleRows(NamedTuple):
    """Schedules one token for each of these slots of one class."""

    rows: IntArray
    full: IntArray
    """Slots of them that need a new block."""


@dataclass(slots=True, frozen=True)
class DrawPool:
    """Moves the first ``count`` requests of the offline pool to its preempted ones, in order."""

    count: int


@dataclass(slots=True, frozen=True)
class OnCache:
    """Operation that only the policy's own KV cache has (``Scheduler.own_cache``)."""

    act: Callable[[Any], None]


Action = Preempt | Grow | Admit | Schedule | ScheduleRows | DrawPool | OnCache


@dataclass(slots=True)
class PreemptionCount:
    online: int = 0
    offline: int = 0
    dropped_tokens: int = 0
    """Tokens whose KV the preemptions dropped; the cache may keep some of it."""
    request_ids: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.online + self.offline

    def add(self, request: Request) -> None:
        self.request_ids.append(request.request_id)
        self.dropped_tokens += request.num_committed_tokens
        if request.is_online:
            self.online += 1
        else:
            self.offline += 1

    def add_all(self, other: "PreemptionCount") -> None:
        self.online += other.online
        self.offline += other.offline
        self.dropped_tokens += other.dropped_tokens
        self.request_ids += other.request_ids
