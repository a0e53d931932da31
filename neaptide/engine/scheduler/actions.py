"""What a draft says is to be done, in its order; ``Scheduler.apply`` does it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.draft import PrefixHit
from neaptide.engine.request import Request


@dataclass(slots=True, frozen=True)
class Preempt:
    """The request gives up its KV and waits again."""

    request: Request


@dataclass(slots=True, frozen=True)
class Grow:
    """The request gets blocks for so many tokens, whether or not it takes part."""

    request: Request
    num_tokens: int


@dataclass(slots=True, frozen=True)
class Admit:
    """The request leaves the queue, takes a seat and its cached prefix."""

    request: Request
    hit: PrefixHit


@dataclass(slots=True, frozen=True)
class TakePart:
    """The request computes so many tokens."""

    request: Request
    num_tokens: int


class TakePartRows(NamedTuple):
    """Rows of one class compute one token each."""

    rows: IntArray
    full: IntArray
    """Those of them that need a block for it."""


@dataclass(slots=True, frozen=True)
class DrawPool:
    """The first requests of the offline pool are taken out and stand among the preempted ones, in their order."""

    count: int


@dataclass(slots=True, frozen=True)
class SwapOut:
    """The request's tokens go to host memory; it keeps its seat and what it has computed."""

    request: Request


Action = Preempt | Grow | Admit | TakePart | TakePartRows | DrawPool | SwapOut


@dataclass(slots=True)
class PreemptionCount:
    online: int = 0
    offline: int = 0
    recomputed_tokens: int = 0
    request_ids: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.online + self.offline

    def add(self, request: Request, recomputed_tokens: int) -> None:
        self.recomputed_tokens += recomputed_tokens
        self.request_ids.append(request.request_id)
        if request.is_online:
            self.online += 1
        else:
            self.offline += 1

    def add_all(self, other: "PreemptionCount") -> None:
        self.online += other.online
        self.offline += other.offline
        self.recomputed_tokens += other.recomputed_tokens
        self.request_ids += other.request_ids
