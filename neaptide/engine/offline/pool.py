"""Offline work that holds no KV yet: rows of batch jobs, flex requests, and preempted requests.

Prompts of batch rows stay in the job's token file until a row is admitted; a job of 50,000 rows costs a few
integers per row here.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId, is_row_of

RowKey = Callable[[TokenFile, int], Any]
"""A sortable key of one row of a job: the rows of a job are handed out in its order."""


@dataclass(slots=True, eq=False)
class _Delivery:
    """What one message brought of a batch."""

    batch_id: str
    tokens: TokenFile
    rows: npt.NDArray[np.int64]
    """Rows to run, in the order in which they are handed out."""
    params_index: npt.NDArray[np.int64]
    params_table: list[SamplingParams]
    stream_rows: frozenset[int]
    arrival_s: float
    deadline_s: float
    salt: bytes
    next_index: int = 0
    """Into ``rows``: what lies before has been handed out."""
    made: dict[int, Request] = field(default_factory=dict)
    """Requests of rows that were looked at and not handed out, by index."""

    @property
    def num_left(self) -> int:
        return len(self.rows) - self.next_index

    def key(self, row_key: RowKey, index: int) -> Any:
        return row_key(self.tokens, int(self.rows[index]))

    def make(self, index: int) -> Request:
        row, params = int(self.rows[index]), self.params_table[self.params_index[index]]
        request = self.made[index] = Request(
            request_id=str(RowId(self.batch_id, row)),
            prompt_token_ids=self.tokens.prompt(row),
            params=params,
            tier=Tier.BATCH,
            arrival_s=self.arrival_s,
            salt=self.salt,
            report_every_step=row in self.stream_rows,
            deadline_s=self.deadline_s,
        )
        return request

    def drop(self, index: int) -> None:
        """Forgets a row that is left."""
        self.rows, self.params_index = np.delete(self.rows, index), np.delete(self.params_index, index)
        self.made = {i - (i > index): request for i, request in self.made.items() if i != index}


@dataclass(slots=True)
class OfflinePool:
    """Preempted requests first (their work is half done), then flex (a caller waits), then jobs by deadline.

    Rows of a job come in file order, or in the order of ``row_key``, whatever messages they came with. Looking
    changes nothing: a row that is looked at is made into a request, which is kept until it is handed out.
    """

    row_key: RowKey | None = None
    _returned: deque[Request] = field(default_factory=deque)
    _flex: deque[Request] = field(default_factory=deque)
    _jobs: dict[str, list[_Delivery]] = field(default_factory=dict)
    """Deliveries with rows left, by batch, in order of arrival."""
    _num_rows: int = 0
    """Rows left in all deliveries."""
    _first_looked_at: list[Request] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._returned) + len(self._flex) + self._num_rows

    def draft(self) -> "PoolDraft":
        """The pool as it is now, to plan against."""
        return PoolDraft(self)

    def take_first_looked_at(self) -> list[Request]:
        """Batch rows whose prompts were looked at for the first time since the last call."""
        requests, self._first_looked_at = self._first_looked_at, []
        return requests

    @property
    def returned(self) -> Sequence[Request]:
        """Preempted requests, in the order in which they are handed out."""
        return self._returned

    @property
    def flex(self) -> Sequence[Request]:
        return self._flex

    def rows(self) -> Iterator[Request]:
        """The rows left, in order; each is made into a request when the iterator comes to it."""
        for delivery, index in self._row_places():
            request = delivery.made.get(index)
            if request is None:
                request = delivery.make(index)
                self._first_looked_at.append(request)
            yield request

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self._flex
        yield from self.rows()

    def add_flex(self, request: Request) -> None:
        self._flex.append(request)

    def give_back(self, request: Request) -> None:
        """A preempted request waits at the front."""
        self._returned.appendleft(request)

    def add_batch(self, message: AddBatch, now_s: float, max_num_tokens: int) -> list[int]:
        """Takes in a job, or more rows of one; returns those that can never run: empty, or longer than
        ``max_num_tokens``.

        Rows of a batch that is here already stand behind its others; they may be in another token file.

        Raises OSError or ValueError if the token file is missing or torn or has no such row.
        """
        if not message.rows:
            return []
        tokens = TokenFile(message.path)
        # Arrays, not a loop: the engine's step waits while tens of thousands of rows are taken in.
        rows, params_index = np.array(message.rows, np.int64), np.array(message.params_index, np.int64)
        if rows.max() >= len(tokens):
            raise ValueError(f"{message.path} has {len(tokens)} rows, row {rows.max()} wanted")
        max_tokens = np.array([params.max_tokens for params in message.params_table], np.int64)
        num_prompt_tokens = tokens.lengths(rows)
        fits = (num_prompt_tokens > 0) & (num_prompt_tokens <= max_num_tokens - max_tokens[params_index])
        refused: list[int] = rows[~fits].tolist()
        rows, params_index = rows[fits], params_index[fits]
        if self.row_key is not None:
            keys = [self.row_key(tokens, row) for row in rows.tolist()]
            order = sorted(range(len(keys)), key=keys.__getitem__)
            rows, params_index = rows[order], params_index[order]
        delivery = _Delivery(
            message.batch_id,
            tokens,
            rows,
            params_index,
            message.params_table,
            frozenset(message.stream_rows),
            now_s,
            message.deadline_s,
            message.salt,
        )
        if delivery.num_left:
            self._jobs.setdefault(message.batch_id, []).append(delivery)
            self._num_rows += delivery.num_left
        # A batch whose last lines come late must not stand behind all that came meanwhile.
        self._jobs = dict(sorted(self._jobs.items(), key=lambda job: job[1][0].deadline_s))
        return refused

    def pop(self) -> Request:
        """Takes the first request."""
        if self._returned:
            return self._returned.popleft()
        if self._flex:
            return self._flex.popleft()
        return self._pop_row()

    def draw(self, count: int) -> None:
        """Puts the first requests among the preempted ones, in their order."""
        for request in reversed([self.pop() for _ in range(count)]):
            self.give_back(request)

    def take(self, request: Request) -> None:
        """Takes a request that is being admitted: the first one, or any that was preempted."""
        taken = self.pop() if next(iter(self), None) is request else self.remove(request.request_id)
        assert taken is request, f"{request.request_id} does not wait in the pool"

    def remove(self, request_id: str) -> Request | None:
        """Takes one waiting flex or preempted request out, or a batch row that has been looked at, wherever it
        stands."""
        for queue in (self._returned, self._flex):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    return request
        for deliveries in self._jobs.values():
            for delivery in deliveries:
                for index, request in delivery.made.items():
                    if request.request_id == request_id:
                        delivery.drop(index)
                        self._row_gone(delivery)
                        return request
        return None

    def cancel_batch(self, batch_id: str) -> list[Request]:
        """Drops the job's rows; returns those of them that had started and were preempted."""
        preempted = [r for r in self._returned if is_row_of(r.request_id, batch_id)]
        for request in preempted:
            self._returned.remove(request)
        deliveries = self._jobs.pop(batch_id, [])
        self._num_rows -= sum(delivery.num_left for delivery in deliveries)
        return preempted

    def _pop_row(self) -> Request:
        delivery, index = next(self._row_places())
        assert index == delivery.next_index
        request = delivery.made.pop(index, None)
        if request is None:
            request = delivery.make(index)
            del delivery.made[index]
        delivery.next_index += 1
        self._row_gone(delivery)
        return request

    def _row_gone(self, delivery: _Delivery) -> None:
        self._num_rows -= 1
        if not delivery.num_left:
            deliveries = self._jobs[delivery.batch_id]
            deliveries.remove(delivery)
            if not deliveries:
                del self._jobs[delivery.batch_id]

    def _row_places(self) -> Iterator[tuple[_Delivery, int]]:
        """Delivery and index of every row left, in order."""
        for deliveries in self._jobs.values():
            if self.row_key is None or len(deliveries) == 1:
                for delivery in deliveries:
                    yield from ((delivery, index) for index in range(delivery.next_index, len(delivery.rows)))
            else:
                yield from _merged(deliveries, self.row_key)


def _merged(deliveries: Sequence[_Delivery], row_key: RowKey) -> Iterator[tuple[_Delivery, int]]:
    """Rows of deliveries that are each in order, by key; at equal key the earlier delivery's first."""

    def keyed(rank: int, delivery: _Delivery) -> Iterator[tuple[Any, int, int]]:
        return ((delivery.key(row_key, index), rank, index) for index in range(delivery.next_index, len(delivery.rows)))

    for _, rank, index in heapq.merge(*(keyed(rank, delivery) for rank, delivery in enumerate(deliveries))):
        yield deliveries[rank], index


class PoolDraft:
    """The pool as a draft of a step would leave it: the same operations, on differences to it."""

    def __init__(self, pool: OfflinePool) -> None:
        self._pool = pool
        self._returned: deque[Request] | None = None
        """Set when it differs from the pool's."""
        self._others = chain(pool.flex, pool.rows())
        self._head: Request | None = None
        """The next of the others, if it was looked at."""
        self._num_others_taken = 0

    def __len__(self) -> int:
        pool = self._pool
        differing = 0 if self._returned is None else len(self._returned) - len(pool.returned)
        return len(pool) - self._num_others_taken + differing

    def peek(self) -> Request | None:
        """The request that should be admitted next."""
        returned = self._pool.returned if self._returned is None else self._returned
        if returned:
            return returned[0]
        if self._head is None:
            self._head = next(self._others, None)
        return self._head

    def pop(self) -> Request:
        """Takes what ``peek`` shows."""
        request = self.peek()
        assert request is not None, "pop on an empty pool"
        if request is self._head:
            self._head = None
            self._num_others_taken += 1
        else:
            self._own_returned().popleft()
        return request

    def give_back(self, request: Request) -> None:
        """A preempted request waits at the front."""
        self._own_returned().appendleft(request)

    def take_returned(self, request: Request) -> None:
        """Takes a preempted request out, wherever it stands."""
        self._own_returned().remove(request)

    def _own_returned(self) -> deque[Request]:
        if self._returned is None:
            self._returned = deque(self._pool.returned)
        return self._returned
