"""Making room: victims are chosen, then dropped; their KV is recomputed when they come back.

Order of victims: offline, youngest admission first; then, for online streams that must grow, online requests
with a later deadline. Never one that takes part in the step being planned, never more than needed, never for a
request that still would not fit.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from neaptide.engine.request import Request
from neaptide.engine.scheduler.queues import Queues, deadline_order


@dataclass(slots=True)
class PreemptionCount:
    online: int = 0
    offline: int = 0
    recomputed_tokens: int = 0
    request_ids: list[str] = field(default_factory=list)


class Preemptor:
    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.count = PreemptionCount()
        """Since it was last replaced by the caller."""

    def make_room(
        self, num_blocks: int, victims: Iterable[Request], keep: Collection[int] = (), seats: int = 0
    ) -> bool:
        """Preempts ``victims``, in their order, until ``num_blocks`` are available and ``seats`` are free; none of
        them if all together would not do.

        ``keep`` are blocks that the requester will read (its prefix hit): freeing those frees nothing for it.
        """
        pool = self._queues.kv.pool
        missing = num_blocks - pool.num_available
        chosen: list[Request] = []
        released: Counter[int] = Counter()
        freed: set[int] = set()
        for victim in victims:
            if missing <= len(freed) and len(chosen) >= seats:
                break
            chosen.append(victim)
            # A block that several victims share is free when the last of them lets go.
            released.update(victim.block_ids)
            freed |= {b for b in victim.block_ids if released[b] == pool.ref_cnt(b) and b not in keep}
        if missing > len(freed) or len(chosen) < seats:
            return False
        for index, victim in enumerate(chosen):
            if index < seats or not freed.isdisjoint(victim.block_ids):
                self.preempt(victim)
        return True

    def preempt(self, victim: Request) -> None:
        self.count.recomputed_tokens += self._queues.preempt(victim)
        self.count.request_ids.append(victim.request_id)
        if victim.is_online:
            self.count.online += 1
        else:
            self.count.offline += 1

    def offline_victims(self, step: int) -> Iterator[Request]:
        """Running offline requests that are not part of this step, youngest first."""
        for request in reversed(list(self._queues.running_offline.values())):
            if request.last_step != step:
                yield request

    def online_victims(self, requester: Request, step: int) -> Iterator[Request]:
        """Running online requests with a later deadline than the requester's, latest first."""
        later = [
            r
            for r in self._queues.running_online.values()
            if r.last_step != step and deadline_order(r) > deadline_order(requester)
        ]
        yield from sorted(later, key=deadline_order, reverse=True)
