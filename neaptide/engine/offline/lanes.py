"""Lanes of the offline pool: the flex requests of one tenant, or the lines of one batch."""

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from neaptide.engine.kv.prefix_nodes import PrefixNode
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.prefix_tree import OrderedFile
from neaptide.engine.offline.row_groups import length_bucket
from neaptide.engine.offline.row_source import UNPLANNED, PlannedRows, PrefixRowSource, RowKey, RowSource
from neaptide.engine.offline.work import Work
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.row_id import RowId
from neaptide.engine.table import RequestTable

PRIOR_OUTPUT_TOKENS = 256
"""Expected answer length if no line of the batch has ended, in tokens."""


class LanePlace(NamedTuple):
    """Position of a waiting line."""

    source: RowSource
    at: int
    """Index into the delivery's rows."""

    @property
    def rank(self) -> int:
        """Rank in the plan; ``UNPLANNED`` without one."""
        return int(self.source.ranks[self.at])

    def request(self, materialized: list[Request]) -> Request:
        """The line's request. A newly made one is appended to ``materialized``."""
        request = self.source.made.get(int(self.source.rows[self.at]))
        if request is None:
            request = self.source.make(self.at)
            materialized.append(request)
        return request


class Lane(ABC):
    """Queue of requests that are admitted one after another.

    Args:
        share: name of the tenant that the requests are charged to.
    """

    is_job = False

    def __init__(self, share: str) -> None:
        self.share = share
        self.deadline_s = math.inf
        self.row_s = 0.0
        """Mean time of a line from its first step to its end, of those that have ended; 0 until one has."""
        self._num_ended = self._num_output_tokens = 0
        """Number and output tokens of ended requests that were admitted."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def num_tokens_left(self) -> int:
        """Waiting prompt tokens plus the expected tokens of their answers."""

    def expected_answer(self, most_tokens: int, of_others: int | None) -> int:
        """Expected tokens of an answer: the mean of the ended answers.

        Args:
            of_others: mean of other lanes, used until an answer of this lane has ended; None if that is not known.
        """
        mean = self._num_output_tokens // self._num_ended if self._num_ended else of_others
        return min(most_tokens, PRIOR_OUTPUT_TOKENS if mean is None else mean)

    def answered(self, num_tokens: int) -> None:
        """Counts the end of an admitted request."""
        self._num_ended += 1
        self._num_output_tokens += num_tokens

    @abstractmethod
    def waiting(self, materialized: list[Request]) -> Iterator[Request]:
        """Waiting requests, in order. Requests made here are appended to ``materialized``."""

    @abstractmethod
    def heads(self, taken: Collection[Request], materialized: list[Request]) -> Iterator[tuple[int, Request]]:
        """Length bucket and request of the candidates that a policy should compare; none of ``taken``.

        Requests made here are appended to ``materialized``.
        """

    @abstractmethod
    def remove(self, request_id: str) -> Request | None:
        """Removes and returns a request that was made; None if there is none with this id."""


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

    def waiting(self, materialized: list[Request]) -> Iterator[Request]:
        return iter(self.requests)

    def heads(self, taken: Collection[Request], materialized: list[Request]) -> Iterator[tuple[int, Request]]:
        """The first request of every length bucket; shared prefixes are not known."""
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
    """Lines of a batch: each token file in its order, or all lines in the order of ``row_key``.

    It has turns while lines wait, and exists until the last one has ended.
    """

    is_job = True

    def __init__(self, share: str, deadline_s: float, row_key: RowKey | None) -> None:
        super().__init__(share)
        self.deadline_s = deadline_s
        self.sources: list[RowSource] = []
        """Deliveries with waiting lines, in order of arrival."""
        self.started: dict[str, Request] = {}
        """Admitted requests that have not ended, by id, including preempted ones."""
        self._files: list[OrderedFile] = []
        self._row_key = row_key
        self._num_run = 0

    def __len__(self) -> int:
        return sum(source.num_left for source in self.sources)

    @property
    def num_tokens_left(self) -> int:
        return sum(source.num_prompt_tokens_left for source in self.sources) + self._answers_waiting

    @property
    def _answers_waiting(self) -> int:
        """Expected tokens of the answers of the waiting lines: as long as those that have ended."""
        if self._num_ended:
            return len(self) * self._num_output_tokens // self._num_ended
        limits = ((one.num_left, min(one.max_output_tokens, PRIOR_OUTPUT_TOKENS)) for one in self.sources)
        return sum(num_left * limit for num_left, limit in limits)

    def work(self, table: RequestTable) -> Work:
        """Remaining work, as far as it can be foreseen.

        Takes constant time for the waiting lines, and array operations for the started ones.
        """
        num_waiting, answers = len(self), self._answers_waiting
        prompts = sum(source.num_prompt_tokens_left for source in self.sources)
        new = sum(source.num_new_tokens_left for source in self.sources)
        waiting = Work(num_waiting, prompts + answers, prompts, new, answers, max(answers - num_waiting, 0))
        return waiting + self._work_started(table) if self.started else waiting

    def _work_started(self, table: RequestTable) -> Work:
        slots = np.array([request.slot for request in self.started.values() if request.slot >= 0], np.int64)
        columns = np.stack([column[slots] for column in (table.prompt, table.total, table.limit, table.computed)])
        preempted = [
            (request.num_prompt_tokens, request.num_tokens, request.num_prompt_tokens + request.params.max_tokens, 0)
            for request in self.started.values()
            if request.slot < 0
        ]
        prompt, total, limit, computed = np.hstack([columns, np.array(preempted, np.int64).reshape(-1, 4).T])
        uncomputed = total - computed
        expected = self._num_output_tokens // self._num_ended if self._num_ended else PRIOR_OUTPUT_TOKENS
        # An answer that is longer than expected has at least one more token.
        answers = np.maximum(np.minimum(expected, limit - prompt) - (total - prompt), 1)
        # One uncomputed token after a computed prompt belongs to the answer. More tokens are a prompt or a
        # recomputation.
        prompts = np.where((total > prompt) & (uncomputed <= 1), 0, uncomputed)
        num_answers, num_prompts = int(answers.sum()), int(prompts.sum())
        num_decodes = num_answers - int(np.count_nonzero(prompts))
        return Work(len(total), int(total.sum()) + num_answers, num_prompts, num_prompts, num_answers, num_decodes)

    def answers_so_far(self) -> dict[int, int]:
        """Output tokens of started lines that have not ended, by line."""
        found = ((RowId.parse(request.request_id), request.num_output_tokens) for request in self.started.values())
        return {row_id.row: num_tokens for row_id, num_tokens in found if row_id is not None and num_tokens}

    def row_ended(self, request: Request, now_s: float) -> None:
        """Counts the end of a line. Only admitted lines say how long answers are."""
        if self.started.pop(request.request_id, None) is not None:
            self.answered(request.num_output_tokens)
            if request.admission_index:
                self._num_run += 1
                self.row_s += (now_s - request.scheduled_s - self.row_s) / self._num_run

    def forget_materialized(self) -> None:
        """Ends the requests that were made for lines of a cancelled batch."""
        for source in self.sources:
            for request in source.made.values():
                request.status = RequestStatus.FINISHED

    def add(self, source: RowSource) -> None:
        self.sources.append(source)

    def hold(self, file: OrderedFile) -> None:
        """Keeps the file's tree for the life of the job: the next lines of the file, even another job's, may be on
        their way."""
        if file not in self._files:
            self._files.append(file)

    def of_file(self, message: AddBatch) -> PrefixRowSource | None:
        """RowSource of the same file from an earlier message, if both are in one order."""
        same = (one for one in self.sources if one.tokens.stem == message.path)
        found = next(same, None)
        return found if isinstance(found, PrefixRowSource) else None

    def waiting(self, materialized: list[Request]) -> Iterator[Request]:
        return (place.request(materialized) for place in self.places())

    def heads(self, taken: Collection[Request], materialized: list[Request]) -> Iterator[tuple[int, Request]]:
        """Candidates of deliveries with prefixes; others have no groups."""
        for source in self.sources:
            if isinstance(source, PrefixRowSource):
                yield from source.heads(taken, materialized)

    def remove(self, request_id: str) -> Request | None:
        row_id = RowId.parse(request_id)
        if row_id is None:
            return None
        for source in self.sources:
            request = source.made.get(row_id.row)
            if request is not None and request.request_id == request_id:
                source.drop(row_id.row)
                self._drop_empty()
                return request
        return None

    def wanted_by_rows_left(self) -> list[tuple[PrefixNode, int]]:
        """Each prefix node, with the number of waiting lines that need it."""
        prefixed = (one for one in self.sources if isinstance(one, PrefixRowSource))
        return [wanted for one in prefixed for wanted in one.wanted_by_rows_left()]

    def _drop_empty(self) -> None:
        self.sources = [source for source in self.sources if source.num_left]

    # ---- the plan ----

    @property
    def is_planned(self) -> bool:
        """Whether a line of the plan waits."""
        return any(source.is_planned for source in self.sources)

    @property
    def planned_span(self) -> tuple[int, int] | None:
        """First and last rank of the waiting lines; None without one."""
        spans = [source.planned_span for source in self.sources if source.is_planned]
        return (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None

    def follow(self, planned: PlannedRows) -> None:
        """Orders the lines of the job by a plan."""
        for source in self.sources:
            source.follow(planned)

    def ranks_of_started(self, planned: PlannedRows) -> dict[str, int]:
        """Ranks in the plan of started lines that have not ended, by id."""
        rows = {row_id.row: name for name in self.started if (row_id := RowId.parse(name)) is not None}
        found = np.flatnonzero(np.isin(planned.rows, list(rows)))
        return {
            rows[row]: rank
            for row, rank in zip(planned.rows[found].tolist(), planned.ranks[found].tolist(), strict=True)
        }

    @property
    def prefix_nodes(self) -> Iterator[PrefixNode]:
        """Prefix nodes of the requests made so far."""
        prefixed = (one for one in self.sources if isinstance(one, PrefixRowSource))
        return (prefix_node for one in prefixed for prefix_node in one.prefix_nodes)

    def places(self) -> Iterator[LanePlace]:
        """Places of the waiting lines, in order: those of the plan first."""
        if len(self.sources) == 1 or (self._row_key is None and not self.is_planned):
            return (LanePlace(one, index) for one in self.sources for index in one.indices())
        return heapq.merge(*(map(LanePlace, repeat(one), one.indices()) for one in self.sources), key=self._order)

    def planned_at(self, rank: int) -> LanePlace | None:
        """Place of the waiting line of this rank; None if the job has none."""
        found = ((one, one.planned_at(rank)) for one in self.sources)
        return next((LanePlace(one, index) for one, index in found if index is not None), None)

    def planned_from_back(self) -> Iterator[LanePlace]:
        """Places of the waiting lines of the plan, the last one first."""
        ends = (map(LanePlace, repeat(one), one.planned_from_back()) for one in self.sources)
        return heapq.merge(*ends, key=lambda place: -place.rank)

    def _order(self, place: LanePlace) -> tuple[int, Any]:
        """Sort key of a place; at equal keys the earlier delivery comes first."""
        is_keyed = self._row_key is not None and place.rank == UNPLANNED
        return place.rank, place.source.key(self._row_key, place.at) if is_keyed and self._row_key else None
