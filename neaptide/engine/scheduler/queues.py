"""Who waits and who runs."""

from bisect import insort
from collections.abc import Callable, Iterator
from typing import Any

from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.offline.pool import OfflinePool, RowKey
from neaptide.engine.params import Tier
from neaptide.engine.request import Request, RequestStatus


def deadline_order(request: Request) -> tuple[float, bool, float, str]:
    """Earliest next deadline first; at equal deadline ``priority`` before ``default``."""
    return (request.next_deadline_s, request.tier is not Tier.PRIORITY, request.arrival_s, request.request_id)


OnlineOrder = Callable[[Request], Any]
"""A sortable key, fixed while the request waits."""


class Queues:
    """Waiting online requests (in their policy's order), the offline pool, and the running set of each class."""

    def __init__(
        self, kv: KVCacheManager, online_order: OnlineOrder = deadline_order, row_key: RowKey | None = None
    ) -> None:
        self.kv = kv
        self._online_order = online_order
        self.waiting_online: list[Request] = []
        self.pool = OfflinePool(row_key)
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
        """From waiting to running; the caller has taken it out of the pool, or it stands in ``waiting_online``."""
        if request.is_online:
            self.waiting_online.remove(request)
            self.running_online[request.request_id] = request
        else:
            self.running_offline[request.request_id] = request
        self._num_admissions += 1
        request.admission_index = self._num_admissions
        request.status = RequestStatus.RUNNING

    def preempt(self, request: Request) -> int:
        """From running back to waiting; returns the tokens whose KV is dropped (recomputed later)."""
        dropped_tokens = request.num_computed_tokens
        self.kv.release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        if request.is_online:
            del self.running_online[request.request_id]
            self.add_online(request)
        else:
            del self.running_offline[request.request_id]
            self.pool.give_back(request)
        return dropped_tokens

    def find(self, request_id: str) -> Request | None:
        """A running request, or a waiting one that is not still a row in a job's token file."""
        running = self.running_online.get(request_id) or self.running_offline.get(request_id)
        if running is not None:
            return running
        return next((r for r in self.waiting_online if r.request_id == request_id), None)

    def finish(self, request: Request) -> None:
        """Takes a request out of wherever it stands, and its blocks back."""
        if request.status is RequestStatus.RUNNING:
            (self.running_online if request.is_online else self.running_offline).pop(request.request_id)
        elif request.is_online:
            self.waiting_online.remove(request)
        else:
            self.pool.remove(request.request_id)
        self.kv.release(request)
        request.status = RequestStatus.FINISHED
