"""Queues of waiting and running requests."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.request import Request, RequestStatus


def deadline_order(request: Request) -> tuple[float, bool, float, str]:
    """Sort key: earliest next deadline first; at equal deadlines ``priority`` before ``default``."""
    return (request.next_deadline_s, not request.is_priority, request.arrival_s, request.request_id)


def streams_first(request: Request) -> tuple[bool, float, bool, float, str]:
    """Sort key: requests that were preempted amid their answers before those without output."""
    return (request.num_output_tokens == 0, *deadline_order(request))


OnlineOrder = Callable[[Request], Any]
"""Sort key that is constant while the request waits."""


class Queues:
    """Waiting online requests (in their policy's order), the offline pool, and the running requests of each class.

    Only messages, ended requests and ``Scheduler.apply`` change them.
    """

    def __init__(
        self, kv: KVCacheManager, pool: OfflinePool | None = None, online_order: OnlineOrder = deadline_order
    ) -> None:
        self.kv = kv
        self.table = kv.table
        self._online_order = online_order
        self.waiting_online: list[Request] = []
        self.pool = OfflinePool() if pool is None else pool
        self.running_online: dict[str, Request] = {}
        self.running_offline: dict[str, Request] = {}
        """In order of admission."""
        self._num_admissions = 0

    @property
    def num_running(self) -> int:
        return len(self.running_online) + len(self.running_offline)

    def running(self) -> Iterator[Request]:
        yield from self.running_online.values()
        yield from self.running_offline.values()

    def add_online(self, request: Request) -> None:
        insort(self.waiting_online, request, key=self._online_order)

    def start(self, request: Request) -> None:
        """Moves a request from waiting to running and assigns it a slot."""
        if request.is_online:
            self._remove_waiting(request)
            self.running_online[request.request_id] = request
        else:
            self.pool.take(request)
            self.running_offline[request.request_id] = request
        self._num_admissions += 1
        request.assign_slot(self.table, self._num_admissions)

    def preempt(self, request: Request) -> None:
        """Moves a request from running to waiting. Tokens that the cache does not keep are computed again later."""
        request.num_reached_tokens = max(request.num_reached_tokens, request.num_committed_tokens)
        self.kv.publish_committed(request)
        self.kv.release(request)
        request.free_slot(RequestStatus.WAITING)
        request.num_preemptions += 1
        if request.is_online:
            del self.running_online[request.request_id]
            self.add_online(request)
        else:
            del self.running_offline[request.request_id]
            self.pool.give_back(request)

    def find(self, request_id: str) -> Request | None:
        """A running request, or a waiting online one."""
        running = self.running_online.get(request_id) or self.running_offline.get(request_id)
        if running is not None:
            return running
        return next((r for r in self.waiting_online if r.request_id == request_id), None)

    def finish(self, request: Request) -> None:
        """Removes a request from its queue or slot and frees its blocks."""
        if request.status is RequestStatus.RUNNING:
            (self.running_online if request.is_online else self.running_offline).pop(request.request_id)
            self.kv.release(request)
            request.free_slot(RequestStatus.FINISHED)
            return
        if request.is_online:
            self._remove_waiting(request)
        else:
            self.pool.remove(request.request_id)
        request.status = RequestStatus.FINISHED

    def draft_waiting_online(self) -> "WaitingDraft":
        return WaitingDraft(self.waiting_online, self._online_order)

    def check_integrity(self) -> None:
        """Raises AssertionError if queues, slots, block tables and the cache do not agree."""
        self.table.check_integrity()
        self.kv.check_integrity(self.running())
        self.pool.check_integrity(self.running_offline.values(), self.kv.prefix_nodes())
        assert all(r.status is RequestStatus.RUNNING and r.table is self.table for r in self.running())
        assert all(r.status is RequestStatus.WAITING and r.table is None for r in self.waiting_online)
        assert all(r.is_online for r in self.running_online.values())
        assert not any(r.is_online for r in self.running_offline.values())
        assert self.num_running == int(self.table.live.sum())

    def _remove_waiting(self, request: Request) -> None:
        del self.waiting_online[_place(self.waiting_online, request, self._online_order)]


class WaitingDraft:
    """The waiting online requests as a draft of a step would leave them."""

    def __init__(self, waiting: list[Request], order: OnlineOrder) -> None:
        self._requests = waiting
        self._order = order
        self._is_own = False

    @property
    def requests(self) -> list[Request]:
        """In the policy's order; not to be changed."""
        return self._requests

    def add(self, request: Request) -> None:
        insort(self._own(), request, key=self._order)

    def remove(self, request: Request) -> None:
        own = self._own()
        del own[_place(own, request, self._order)]

    def _own(self) -> list[Request]:
        if not self._is_own:
            self._requests, self._is_own = list(self._requests), True
        return self._requests


def _place(requests: list[Request], request: Request, order: OnlineOrder) -> int:
    """Index of the request; requests with equal keys are adjacent."""
    index = bisect_left(requests, order(request), key=order)
    while requests[index] is not request:
        index += 1
    return index


class Reservation:
    """Reservation of blocks or slots for one request without room: nothing at first, then a growing part of its need.

    What is reserved stays unused until the request starts. The policy limits the time of that.
    """

    def __init__(self) -> None:
        self.holder: Request | None = None
        self._from_s = self._grown_s = 0.0

    def begin(self, holder: Request, from_s: float, growth_s: float) -> None:
        """Starts a reservation that grows from ``from_s`` on and is complete after ``growth_s``, which is positive."""
        self.holder, self._from_s, self._grown_s = holder, from_s, from_s + growth_s

    def part(self, now_s: float) -> float:
        """Reserved part of the holder's need: 0 to 1."""
        if self.holder is None or now_s <= self._from_s:
            return 0.0
        return min((now_s - self._from_s) / (self._grown_s - self._from_s), 1.0)

    def stood_s(self, now_s: float) -> float:
        """Time since the reservation began to grow."""
        return max(now_s - self._from_s, 0.0)

    def put_off(self, now_s: float) -> None:
        """Delays a reservation that is of no use now. It starts to grow again after as much time as it has lasted."""
        delay_s = max(now_s + self.stood_s(now_s) - self._from_s, 0.0)
        self._from_s, self._grown_s = self._from_s + delay_s, self._grown_s + delay_s
