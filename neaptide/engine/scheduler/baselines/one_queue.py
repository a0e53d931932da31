"""Base of the engines without request classes: online and offline requests wait in one queue."""

import math
from typing import ClassVar

from neaptide.engine.kv.draft import PrefixHit
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.queues import OnlineOrder

ArrivalKey = tuple[float, float, int]


def arrival_order(request: Request) -> ArrivalKey:
    """Sort key: first come, first served.

    The lines of a job arrive at one instant and are first admitted in file order. So among equal arrivals, earlier
    first admissions come first, and requests that were never admitted last.
    """
    first_admitted_s = request.scheduled_s if request.admission_index else math.inf
    return (request.arrival_s, first_admitted_s, request.admission_index)


def priority_of(request: Request) -> int:
    """Priority of a request, lower is earlier: tier ``priority`` -1, ``default`` 0, offline work 1."""
    if not request.is_online:
        return 1
    return -1 if request.tier is Tier.PRIORITY else 0


def priority_order(request: Request) -> tuple[int, ArrivalKey]:
    return (priority_of(request), arrival_order(request))


class OneQueueScheduler(Scheduler):
    """A policy whose waiting requests form one queue, in ``online_order``, whatever their class.

    Offline work waits in the pool in the pool's own order: preempted requests, ``flex``, lines of jobs. Its first
    request is compared with the first online one.

    While the operator has paused offline work, it neither starts nor runs. The original engines have no such switch. So
    that it protects online work here too, paused requests lose their KV, youngest first, when online work lacks room.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(arrival_order)

    def _running(self, draft: Draft) -> list[Request]:
        """Requests that hold KV and may compute, in order of admission."""
        running = draft.all_running()
        return [request for request in running if request.is_online] if self.offline_paused else running

    def _waiting_head(self, draft: Draft) -> Request | None:
        """The next waiting request; one from the pool is still in it."""
        waiting = draft.waiting_online[:1]
        offline = None if self.offline_paused else draft.pool.peek()
        if offline is not None:
            waiting.append(offline)
        return min(waiting, key=type(self).online_order, default=None)

    def _find_room(self, draft: Draft, num_blocks: int) -> bool:
        """Whether ``num_blocks`` blocks are available, if need be after preempting paused requests."""
        while not draft.kv.fits(num_blocks):
            if not self._drop_paused(draft):
                return False
        return True

    def _find_room_to_admit(self, draft: Draft, hit: PrefixHit, num_tokens: int, spare_blocks: int = 0) -> bool:
        """Whether a waiting request can start with ``num_tokens`` after its hit and leave ``spare_blocks``."""
        # Checked each time, because a preempted request may have held part of the hit.
        while not draft.kv.fits(draft.kv.admission_cost(hit, num_tokens) + spare_blocks):
            if not self._drop_paused(draft):
                return False
        return True

    def _find_slot(self, draft: Draft) -> bool:
        """Whether one more request may run."""
        while draft.num_running >= self.config.max_num_seqs:
            if not self._drop_paused(draft):
                return False
        return True

    def _drop_paused(self, draft: Draft) -> bool:
        """Preempts the youngest paused request; returns False if there is none."""
        victim = next(draft.offline_victims(), None) if self.offline_paused else None
        if victim is None:
            return False
        draft.preempt(victim)
        return True
