"""Lanes of the offline pool: the flex requests of one share, or the rows of one batch."""

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from neaptide.engine.kv.segments import Segment
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.delivery import UNPLANNED, Delivery, PlannedRows, PrefixDelivery, RowKey
from neaptide.engine.offline.prefix_tree import OrderedFile
from neaptide.engine.offline.row_groups import length_bucket
from neaptide.engine.offline.work import Work
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.row_id import RowId
from neaptide.engine.table import RequestTable

PRIOR_OUTPUT_TOKENS = 256
"""Of an answer, if it may be so long and no row of its batch has ended."""


class Place(NamedTuple):
    """Of a row that waits."""

    delivery: Delivery
    at: int
    """Into the delivery's rows."""

    @property
    def rank(self) -> int:
        """In the plan; ``UNPLANNED`` without one."""
        return int(self.delivery.ranks[self.at])

    def request(self, looked_at: list[Request]) -> Request:
        """One that is made for it is appended to ``looked_at``."""
        request = self.delivery.made.get(int(self.delivery.rows[self.at]))
        if request is None:
            request = self.delivery.make(self.at)
            looked_at.append(request)
        return request


class Lane(ABC):
    """Requests that are handed out one after another.

    Args:
        share: whose share of the offline work they take.
    """

    is_job = False

    def __init__(self, share: str) -> None:
        self.share = share
        self.deadline_s = math.inf
        self.row_s = 0.0
        """That a row takes from its first step to its end, the mean of those that have ended; 0 until one has."""
        self._num_ended = self._num_output_tokens = 0
        """Of those that were handed out."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def num_tokens_left(self) -> int:
        """Of the prompts of what waits, and of their answers as far as these can be foreseen."""

    def expected_answer(self, most_tokens: int, of_others: int | None) -> int:
        """Tokens that an answer is taken to have: as many as those that have ended had on average.

        Args:
            of_others: what those of others had, to go by until one of its own has ended; None if that is not known.
        """
        mean = self._num_output_tokens // self._num_ended if self._num_ended else of_others
        return min(most_tokens, PRIOR_OUTPUT_TOKENS if mean is None else mean)

    def answered(self, num_tokens: int) -> None:
        """A request that was handed out has ended, with so many tokens."""
        self._num_ended += 1
        self._num_output_tokens += num_tokens

    @abstractmethod
    def waiting(self, looked_at: list[Request]) -> Iterator[Request]:
        """What waits, in order. Requests that are made for it are appended to ``looked_at``."""

    @abstractmethod
    def heads(self, taken: Collection[Request], looked_at: list[Request]) -> Iterator[tuple[int, Request]]:
        """Length bucket and request of those that a policy should compare, for they stand for the others; none of
        ``taken``. Requests that are made for it are appended to ``looked_at``."""

    @abstractmethod
    def remove(self, request_id: str) -> Request | None:
        """Takes a request that was looked at, wherever it stands; None if there is none of the name."""


class FlexLane(Lane):
    def __init__(self, share: str) -> None:
        super().__init__(share)
        self.requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_tokens_left(self) -> int:
        prompts = sum(request.num_prompt_tokens for request in self.requests)
        return prompts + sum(min(request.params.max_tokens, PRIOR_OUTPUT_TOKENS) for request in self.requests)

    def waiting(self, looked_at: list[Request]) -> Iterator[Request]:
        return iter(self.requests)

    def heads(self, taken: Collection[Request], looked_at: list[Request]) -> Iterator[tuple[int, Request]]:
        """The first of every length; what they share is not known."""
        seen = set[int]()
        for request in self.requests:
            bucket = length_bucket(request.num_prompt_tokens)
            if bucket not in seen and request not in taken:
                seen.add(bucket)
                yield bucket, request

    def remove(self, request_id: str) -> Request | None:
        for request in self.requests:
            if request.request_id == request_id:
                self.requests.remove(request)
                return request
        return None


class JobLane(Lane):
    """The rows of a batch: of each token file in its order, or all of them in the order of ``row_key``.

    It has a turn while rows wait, and is there until the last one has ended.
    """

    is_job = True

    def __init__(self, share: str, deadline_s: float, row_key: RowKey | None) -> None:
        super().__init__(share)
        self.deadline_s = deadline_s
        self.deliveries: list[Delivery] = []
        """With rows left, in order of arrival."""
        self.started: dict[str, Request] = {}
        """Rows that were handed out and have not ended, preempted ones as well, by id."""
        self._files: list[OrderedFile] = []
        self._row_key = row_key
        self._num_run = 0

    def __len__(self) -> int:
        return sum(delivery.num_left for delivery in self.deliveries)

    @property
    def num_tokens_left(self) -> int:
        return sum(delivery.num_prompt_tokens_left for delivery in self.deliveries) + self._answers_waiting

    @property
    def _answers_waiting(self) -> int:
        """Tokens of the answers of the rows that wait, taken to be as long as those of the rows that have ended."""
        if self._num_ended:
            return len(self) * self._num_output_tokens // self._num_ended
        limits = ((one.num_left, min(one.max_output_tokens, PRIOR_OUTPUT_TOKENS)) for one in self.deliveries)
        return sum(num_left * limit for num_left, limit in limits)

    def work(self, table: RequestTable) -> Work:
        """What is left, as far as it can be foreseen: a few numbers for the rows that wait, however many they are, and
        array operations over those that have started."""
        num_waiting, answers = len(self), self._answers_waiting
        prompts = sum(delivery.num_prompt_tokens_left for delivery in self.deliveries)
        new = sum(delivery.num_new_tokens_left for delivery in self.deliveries)
        waiting = Work(num_waiting, prompts + answers, prompts, new, answers, max(answers - num_waiting, 0))
        return waiting + self._work_started(table) if self.started else waiting

    def _work_started(self, table: RequestTable) -> Work:
        seats = np.array([request.seat for request in self.started.values() if request.seat >= 0], np.int64)
        columns = np.stack([column[seats] for column in (table.prompt, table.total, table.limit, table.computed)])
        preempted = [
            (request.num_prompt_tokens, request.num_tokens, request.num_prompt_tokens + request.params.max_tokens, 0)
            for request in self.started.values()
            if request.seat < 0
        ]
        prompt, total, limit, computed = np.hstack([columns, np.array(preempted, np.int64).reshape(-1, 4).T])
        uncomputed = total - computed
        expected = self._num_output_tokens // self._num_ended if self._num_ended else PRIOR_OUTPUT_TOKENS
        # One that goes on beyond what was expected of it will at least end.
        answers = np.maximum(np.minimum(expected, limit - prompt) - (total - prompt), 1)
        # The token behind a computed prompt is the answer's own; more are a prompt, or one that is computed again.
        prompts = np.where((total > prompt) & (uncomputed <= 1), 0, uncomputed)
        num_answers, num_prompts = int(answers.sum()), int(prompts.sum())
        num_decodes = num_answers - int(np.count_nonzero(prompts))
        return Work(len(total), int(total.sum()) + num_answers, num_prompts, num_prompts, num_answers, num_decodes)

    def answers_so_far(self) -> dict[int, int]:
        """Tokens that rows have put out which have not ended, by row."""
        found = ((RowId.parse(request.request_id), request.num_output_tokens) for request in self.started.values())
        return {row_id.row: num_tokens for row_id, num_tokens in found if row_id is not None and num_tokens}

    def row_ended(self, request: Request, now_s: float) -> None:
        """A row has ended; only one that was handed out tells how long answers are."""
        if self.started.pop(request.request_id, None) is not None:
            self.answered(request.num_output_tokens)
            if request.admission_index:
                self._num_run += 1
                self.row_s += (now_s - request.scheduled_s - self.row_s) / self._num_run

    def forget_looked_at(self) -> None:
        """The batch is cancelled: requests of rows that were looked at will never run."""
        for delivery in self.deliveries:
            for request in delivery.made.values():
                request.status = RequestStatus.FINISHED

    def add(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    def hold(self, file: OrderedFile) -> None:
        """Keeps it while the job is there: when all of its rows have been handed out, the next ones of the file, which
        may be another job's, are on their way."""
        if file not in self._files:
            self._files.append(file)

    def of_file(self, message: AddBatch) -> PrefixDelivery | None:
        """What an earlier message brought of the same file, where that is in one order with this one."""
        same = (one for one in self.deliveries if one.tokens.stem == message.path)
        found = next(same, None)
        return found if isinstance(found, PrefixDelivery) else None

    def waiting(self, looked_at: list[Request]) -> Iterator[Request]:
        return (place.request(looked_at) for place in self.places())

    def heads(self, taken: Collection[Request], looked_at: list[Request]) -> Iterator[tuple[int, Request]]:
        """Of a pool that goes by prefix; others know no groups."""
        for delivery in self.deliveries:
            if isinstance(delivery, PrefixDelivery):
                yield from delivery.heads(taken, looked_at)

    def remove(self, request_id: str) -> Request | None:
        row_id = RowId.parse(request_id)
        if row_id is None:
            return None
        for delivery in self.deliveries:
            request = delivery.made.get(row_id.row)
            if request is not None and request.request_id == request_id:
                delivery.drop(row_id.row)
                self._drop_empty()
                return request
        return None

    def wanted_by_rows_left(self) -> list[tuple[Segment, int]]:
        """Segments, and how many of the rows left want each."""
        prefixed = (one for one in self.deliveries if isinstance(one, PrefixDelivery))
        return [wanted for one in prefixed for wanted in one.wanted_by_rows_left()]

    def _drop_empty(self) -> None:
        self.deliveries = [delivery for delivery in self.deliveries if delivery.num_left]

    # ---- the plan ----

    @property
    def is_planned(self) -> bool:
        """Whether a row of the plan waits."""
        return any(delivery.is_planned for delivery in self.deliveries)

    @property
    def planned_span(self) -> tuple[int, int] | None:
        """The first and the last rank of rows that wait; None without one."""
        spans = [delivery.planned_span for delivery in self.deliveries if delivery.is_planned]
        return (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None

    def follow(self, planned: PlannedRows) -> None:
        """A plan has these rows of the job."""
        for delivery in self.deliveries:
            delivery.follow(planned)

    def ranks_of_started(self, planned: PlannedRows) -> dict[str, int]:
        """Of rows that were handed out and have not ended, those that a plan has with their ranks, by id."""
        rows = {row_id.row: name for name in self.started if (row_id := RowId.parse(name)) is not None}
        found = np.flatnonzero(np.isin(planned.rows, list(rows)))
        return {
            rows[row]: rank
            for row, rank in zip(planned.rows[found].tolist(), planned.ranks[found].tolist(), strict=True)
        }

    @property
    def segments(self) -> Iterator[Segment]:
        """Of the prefixes of rows that were looked at."""
        prefixed = (one for one in self.deliveries if isinstance(one, PrefixDelivery))
        return (segment for one in prefixed for segment in one.segments)

    def places(self) -> Iterator[Place]:
        """Of every row left, in order: those of the plan first."""
        if len(self.deliveries) == 1 or (self._row_key is None and not self.is_planned):
            return (Place(one, index) for one in self.deliveries for index in one.indices())
        return heapq.merge(*(map(Place, repeat(one), one.indices()) for one in self.deliveries), key=self._order)

    def planned_at(self, rank: int) -> Place | None:
        """The row of this rank, if it is of the job and waits."""
        found = ((one, one.planned_at(rank)) for one in self.deliveries)
        return next((Place(one, index) for one, index in found if index is not None), None)

    def planned_from_back(self) -> Iterator[Place]:
        """Of every row of the plan that is left, the last one first."""
        ends = (map(Place, repeat(one), one.planned_from_back()) for one in self.deliveries)
        return heapq.merge(*ends, key=lambda place: -place.rank)

    def _order(self, place: Place) -> tuple[int, Any]:
        """At equal order the earlier delivery's first."""
        is_keyed = self._row_key is not None and place.rank == UNPLANNED
        return place.rank, place.delivery.key(self._row_key, place.at) if is_keyed and self._row_key else None
