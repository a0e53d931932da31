"""Offline work that holds no KV yet: rows of batch jobs, flex requests, and preempted requests.

Prompts of batch rows stay in the job's token file until a row is admitted; a job of 50,000 rows costs a few
integers per row here.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Part:
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

    @property
    def num_left(self) -> int:
        return len(self.rows) - self.next_index

    def head_key(self, row_key: RowKey) -> Any:
        return row_key(self.tokens, int(self.rows[self.next_index]))

    def next_request(self) -> Request:
        row, params = int(self.rows[self.next_index]), self.params_table[self.params_index[self.next_index]]
        self.next_index += 1
        return Request(
            request_id=row_request_id(self.batch_id, row),
            prompt_token_ids=self.tokens.prompt(row),
            params=params,
            tier=Tier.BATCH,
            arrival_s=self.arrival_s,
            ttft_slo_s=max(self.deadline_s - self.arrival_s, 0.0),
            tpot_slo_s=0.0,
            salt=self.salt,
            report_every_step=row in self.stream_rows,
        )


def row_request_id(batch_id: str, row: int) -> str:
    return str(RowId(batch_id, row))


@dataclass(slots=True)
class OfflinePool:
    """Preempted requests first (their work is half done), then flex (a caller waits), then jobs by deadline.

    Rows of a job come in file order, or in the order of ``row_key``, whatever messages they came with.
    """

    row_key: RowKey | None = None
    on_row: Callable[[Request], None] | None = None
    """Called when a batch row is made into a request: from now on the scheduler may look at its prompt."""
    _returned: deque[Request] = field(default_factory=deque)
    _flex: deque[Request] = field(default_factory=deque)
    _jobs: dict[str, deque[_Part]] = field(default_factory=dict)
    """Parts with rows left, by batch, in order of arrival."""
    _head: Request | None = None
    """The next batch row, made into a request when somebody looked at it."""

    def __len__(self) -> int:
        return (
            len(self._returned)
            + len(self._flex)
            + (self._head is not None)
            + sum(part.num_left for parts in self._jobs.values() for part in parts)
        )

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
        part = _Part(
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
        if message.batch_id not in self._jobs:
            self._jobs[message.batch_id] = deque()
        self._jobs[message.batch_id].append(part)
        # A batch whose last lines come late must not stand behind all that came meanwhile.
        self._jobs = dict(sorted(self._jobs.items(), key=lambda job: job[1][0].deadline_s))
        return refused

    def peek(self) -> Request | None:
        """The request that should be admitted next."""
        if self._returned:
            return self._returned[0]
        if self._flex:
            return self._flex[0]
        if self._head is None:
            self._head = self._next_row()
        return self._head

    def pop(self) -> Request:
        """Takes what ``peek`` showed."""
        if self._returned:
            return self._returned.popleft()
        if self._flex:
            return self._flex.popleft()
        request = self._head if self._head is not None else self._next_row()
        self._head = None
        assert request is not None, "pop on an empty pool"
        return request

    def remove(self, request_id: str) -> Request | None:
        """Takes one waiting flex or preempted request out, wherever it stands, or the batch row that ``peek`` made."""
        if self._head is not None and self._head.request_id == request_id:
            request, self._head = self._head, None
            return request
        for queue in (self._returned, self._flex):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    return request
        return None

    def cancel_batch(self, batch_id: str) -> list[Request]:
        """Drops the job's rows; returns those of them that had started and were preempted."""
        preempted = [r for r in self._returned if is_row_of(r.request_id, batch_id)]
        for request in preempted:
            self._returned.remove(request)
        if self._head is not None and is_row_of(self._head.request_id, batch_id):
            self._head = None
        self._jobs.pop(batch_id, None)
        return preempted

    def _next_row(self) -> Request | None:
        while self._jobs:
            batch_id, parts = next(iter(self._jobs.items()))
            while parts:
                if parts[0].num_left:
                    request = self._next_part(parts).next_request()
                    if self.on_row is not None:
                        self.on_row(request)
                    return request
                parts.popleft()
            del self._jobs[batch_id]
        return None

    def _next_part(self, parts: deque[_Part]) -> _Part:
        if self.row_key is None:
            return parts[0]
        row_key = self.row_key
        return min((part for part in parts if part.num_left), key=lambda part: part.head_key(row_key))
