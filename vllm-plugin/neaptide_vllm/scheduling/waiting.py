"""The queue of waiting requests that vLLM's scheduler admits from."""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from vllm.v1.core.sched.request_queue import PriorityRequestQueue, RequestQueue
from vllm.v1.request import Request

from neaptide_vllm.scheduling.online import Online


def _order(online: Online) -> tuple[bool, float]:
    """Requests that were preempted amid their answers first, then by deadline. It is fixed while a request waits."""
    return not online.request.num_output_tokens, online.next_deadline_s


class WaitingQueue(RequestQueue):
    """Online requests in the order that the step planned, then offline ones by priority and age.

    During a step vLLM sees only the online requests that the step names. The others count as waiting and come again in
    the next step.
    """

    def __init__(self, known: Mapping[str, Online]) -> None:
        self._known = known
        self.online: list[Online] = []
        self.offline = PriorityRequestQueue()
        self._named: deque[Request] = deque()
        self._offers_offline = True
        self._is_closed = False

    def begin(self, named: Iterable[Request], offers_offline: bool) -> None:
        """Opens the queue for a step. ``named`` are the online requests that may be admitted, in order."""
        self._named = deque(named)
        self._offers_offline = offers_offline
        self._is_closed = False

    def close(self) -> None:
        """Ends admissions of this step. vLLM 0.33 would go on to look at all that wait."""
        self._is_closed = True

    def close_offline(self) -> None:
        """Ends admissions of offline requests in this step."""
        self._offers_offline = False

    def add_request(self, request: Request) -> None:
        online = self._known.get(request.request_id)
        if online is None:
            self.offline.add_request(request)
        else:
            insort(self.online, online, key=_order)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        return self._named[0] if self._named else self.offline.peek_request()

    def pop_request(self) -> Request:
        if not self._named:
            return self.offline.pop_request()
        request = self._named.popleft()
        self.online.remove(self._known[request.request_id])
        return request

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        removed = list(requests)
        gone = {request.request_id for request in removed}
        self.online = [online for online in self.online if online.request.request_id not in gone]
        self._named = deque(request for request in self._named if request.request_id not in gone)
        self.offline.remove_requests({request for request in removed if request.request_id not in self._known})

    def __len__(self) -> int:
        return len(self.online) + len(self.offline)

    def __bool__(self) -> bool:
        """Whether a request may be admitted now."""
        return not self._is_closed and bool(self._named or (self._offers_offline and self.offline))

    def __iter__(self) -> Iterator[Request]:
        yield from (online.request for online in self.online)
        yield from self.offline
