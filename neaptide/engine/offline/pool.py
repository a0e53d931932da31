"""Offline work that holds no KV yet: rows of batch jobs, flex requests, and preempted requests.

Prompts of batch rows stay in the job's token file until a row is admitted; a job of 50,000 rows costs a few
integers per row here.
"""

from collections import deque
from dataclasses import dataclass, field

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request


@dataclass(slots=True)
class _Job:
    batch_id: str
    tokens: TokenFile
    rows: list[tuple[int, SamplingParams]]
    """Rows to run, in file order."""
    stream_rows: frozenset[int]
    arrival_s: float
    deadline_s: float
    salt: bytes
    next_index: int = 0
    """Into ``rows``: what lies before has been handed out."""

    @property
    def num_left(self) -> int:
        return len(self.rows) - self.next_index

    def next_request(self) -> Request:
        row, params = self.rows[self.next_index]
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
    return f"{batch_id}:{row}"


@dataclass(slots=True)
class OfflinePool:
    """Preempted requests first (their work is half done), then flex (a caller waits), then jobs in file order."""

    _returned: deque[Request] = field(default_factory=deque)
    _flex: deque[Request] = field(default_factory=deque)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _head: Request | None = None
    """The next batch row, made into a request when somebody looked at it."""

    def __len__(self) -> int:
        return (
            len(self._returned)
            + len(self._flex)
            + (self._head is not None)
            + sum(job.num_left for job in self._jobs.values())
        )

    def add_flex(self, request: Request) -> None:
        self._flex.append(request)

    def give_back(self, request: Request) -> None:
        """A preempted request waits at the front."""
        self._returned.appendleft(request)

    def add_batch(self, message: AddBatch, now_s: float, max_num_tokens: int) -> list[int]:
        """Takes in a job; returns the rows that can never run: empty, or longer than ``max_num_tokens``.

        Raises OSError or ValueError if the token file is missing or torn, ValueError if the job is here already.
        """
        if message.batch_id in self._jobs:
            raise ValueError(f"{message.batch_id} was submitted twice")
        if not message.rows:
            return []
        tokens = TokenFile(message.path)
        if max(message.rows) >= len(tokens):
            raise ValueError(f"{message.path} has {len(tokens)} rows, row {max(message.rows)} wanted")
        rows: list[tuple[int, SamplingParams]] = []
        refused: list[int] = []
        for row, index in zip(message.rows, message.params_index, strict=True):
            params = message.params_table[index]
            num_prompt_tokens = tokens.num_tokens(row)
            if 0 < num_prompt_tokens <= max_num_tokens - params.max_tokens:
                rows.append((row, params))
            else:
                refused.append(row)
        stream_rows = frozenset(message.stream_rows)
        job = _Job(message.batch_id, tokens, rows, stream_rows, now_s, message.deadline_s, message.salt)
        self._jobs[message.batch_id] = job
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
        """Takes one waiting flex or preempted request out, wherever it stands."""
        for queue in (self._returned, self._flex):
            for request in queue:
                if request.request_id == request_id:
                    queue.remove(request)
                    return request
        return None

    def cancel_batch(self, batch_id: str) -> list[Request]:
        """Drops the job's rows; returns those of them that had started and were preempted."""
        preempted = [r for r in self._returned if r.request_id.startswith(f"{batch_id}:")]
        for request in preempted:
            self._returned.remove(request)
        if self._head is not None and self._head.request_id.startswith(f"{batch_id}:"):
            self._head = None
        self._jobs.pop(batch_id, None)
        return preempted

    def _next_row(self) -> Request | None:
        while self._jobs:
            job = next(iter(self._jobs.values()))
            if job.num_left:
                return job.next_request()
            del self._jobs[job.batch_id]
        return None
