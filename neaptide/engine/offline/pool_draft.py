"""The offline pool as a draft of a step would leave it."""

from collections import deque
from collections.abc import Iterator, Sequence

from neaptide.engine.offline.planned import Ends
from neaptide.engine.offline.planning.work_left import StepMeans
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.row_groups import length_bucket
from neaptide.engine.request import Request


class PoolDraft:
    """The same operations as the pool's, on differences to it."""

    def __init__(self, pool: OfflinePool) -> None:
        self._pool = pool
        self._returned: deque[Request] | None = None
        """Set when it differs from the pool's."""
        self._others = pool.in_turn()
        self._head: Request | None = None
        """The next of the others, if it was looked at."""
        self._taken: set[Request] = set()
        """Those of the others that were taken."""
        self._num_returned_passed = 0

    def __len__(self) -> int:
        pool = self._pool
        differing = 0 if self._returned is None else len(self._returned) - len(pool.returned)
        return len(pool) - len(self._taken) + differing

    @property
    def ends(self) -> Ends | None:
        """As the pool's."""
        return self._pool.ends

    @property
    def target_density(self) -> float | None:
        """As the pool's."""
        return self._pool.target_density

    @property
    def usual_step(self) -> StepMeans:
        """As the pool's."""
        return self._pool.usual_step

    def peek(self) -> Request | None:
        """The request that should be admitted next."""
        returned = self._present_returned
        if self._num_returned_passed < len(returned):
            return returned[self._num_returned_passed]
        if self._head is None:
            self._head = next((request for request in self._others if request not in self._taken), None)
        return self._head

    def heads(self) -> Iterator[tuple[int, Request]]:
        """Length bucket and request: all preempted requests, then those that stand for the others."""
        yield from [(length_bucket(request.num_prompt_tokens), request) for request in self._present_returned]
        yield from self._pool.heads(self._taken)

    def pop(self) -> Request:
        """Takes what ``peek`` shows."""
        request = self.peek()
        assert request is not None, "pop on an empty pool"
        if request is self._head:
            self._head = None
            self._taken.add(request)
        else:
            del self._own_returned()[self._num_returned_passed]
        return request

    def take(self, request: Request) -> None:
        """Takes a request out, wherever it stands."""
        if request is self._head:
            self._head = None
        elif request in self._present_returned:
            returned = self._own_returned()
            self._num_returned_passed -= returned.index(request) < self._num_returned_passed
            returned.remove(request)
            return
        self._taken.add(request)

    def pass_by(self) -> None:
        """Leaves what ``peek`` shows where it is, and goes on behind it."""
        if self.peek() is self._head:
            self._head = None
        else:
            self._num_returned_passed += 1

    def give_back(self, request: Request) -> None:
        """A preempted request waits at the front; there it is not for this step if that has passed others by."""
        self._own_returned().appendleft(request)
        self._num_returned_passed += self._num_returned_passed > 0

    @property
    def _present_returned(self) -> Sequence[Request]:
        return self._pool.returned if self._returned is None else self._returned

    def _own_returned(self) -> deque[Request]:
        if self._returned is None:
            self._returned = deque(self._pool.returned)
        return self._returned
