"""Offline work of a simulation: sets of requests become batch jobs over token files, as in the server."""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.prefix_tree import write_prefixes
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams
from neaptide.executors.simulated.trace_executor import PROMPT_VOCABULARY
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, token_ids

NO_DEADLINE_S = 1e9
OFFLINE_PREFIX = "offline-"


class OfflineFeed:
    """Submits the sets as successive jobs, and refills the pool before it runs out of work.

    A set that is a job of its own (``OfflineSet.is_job``) is submitted once, at its time. The others are submitted
    together, shuffled by the seed unless ``keep_order``. A set with a batch size comes in batches, each after the
    previous one has ended. Sets with arrivals come at these times, rows due together as one job, and are not refilled.
    Their pool may be empty at times.

    Args:
        output_limit: ``max_tokens`` of a request. Requests without room for a token are skipped, longer outputs are
            cut.
        refill: add rows with new contents if fewer rows wait than ``low_water``, or than half of the sets' rows. As
            many generations are added as reach that number again.
        deadline_s: of every job, counted from its submission.

    Raises:
        ValueError: a set with a batch size is mixed with others or has arrivals, no request fits, or a set cannot be
            refilled.
    """

    def __init__(
        self,
        sets: Sequence[OfflineSet],
        directory: Path,
        *,
        output_limit: Callable[[TraceRequest], int],
        seed: int,
        keep_order: bool,
        refill: bool,
        low_water: int,
        deadline_s: float = NO_DEADLINE_S,
    ) -> None:
        self._own_jobs = sorted((one for one in sets if one.is_job), key=lambda one: one.submitted_s)
        """Jobs that have not been submitted yet."""
        own_requests = [request for one in self._own_jobs for request in one.requests]
        sets = [one for one in sets if not one.is_job]
        batch_sizes = [one.batch_size for one in sets if one.batch_size is not None]
        if batch_sizes and (len(sets) > 1 or self._own_jobs):
            raise ValueError("a set that is submitted in batches cannot be mixed with other sets")
        self.arrives = any(request.arrival_s > 0 for one in sets for request in one.requests)
        if batch_sizes and self.arrives:
            raise ValueError("a set that is submitted in batches cannot have arrivals as well")
        refill = refill and not self.arrives
        if refill:
            for one in sets:
                one.check_refill()
        self._sets = sets
        self._directory = directory
        self._output_limit = output_limit
        self._deadline_s = deadline_s
        self._refill = refill and bool(sets)
        self._jobs: list[tuple[int, list[TraceRequest]]] = []
        """Generation and rows of the submitted jobs, by the number in the job's id."""
        requests = [request for one in sets for request in one.requests]
        self._order = list(range(len(requests)))
        if not keep_order and len(sets) > 1:  # a single set is already shuffled
            random.Random(seed).shuffle(self._order)
        fitting = self._fitting([requests[k] for k in self._order])
        all_fitting = fitting + self._fitting(own_requests)
        self.num_left_out = len(requests) + len(own_requests) - len(all_fitting)
        if (requests or own_requests) and not all_fitting:
            raise ValueError("no offline request fits into the context")
        self.num_cut = sum(request.output_tokens > output_limit(request) for request in all_fitting)
        """Rows of the sets whose answer exceeds its limit."""
        self.batch_size = batch_sizes[0] if batch_sizes else None
        self._pending = sorted(fitting, key=lambda request: request.arrival_s) if self.arrives else fitting
        self._generation = 0
        self.first_generation_size = self._first_open = len(all_fitting)
        self._low_water = max(low_water, len(fitting) // 2)
        self.num_submitted = 0
        self.num_ended = 0
        """Rows whose end was reported by ``row_ended``."""

    @property
    def may_be_empty(self) -> bool:
        """Whether the pool may be empty between submissions."""
        return self.batch_size is not None or self.arrives

    @property
    def first_generation_done(self) -> bool:
        return not self._first_open

    @property
    def next_arrival_s(self) -> float:
        """Next arrival of rows or of a job; infinite if there is none."""
        next_job_s = self._own_jobs[0].submitted_s if self._own_jobs else math.inf
        return min(self._pending[0].arrival_s if self.arrives and self._pending else math.inf, next_job_s)

    def messages(self, waiting: int, now_s: float) -> Iterator[AddBatch]:
        """Jobs to submit now, while ``waiting`` rows wait in the pool.

        The engine must handle each one before the next is requested, because its token file is then deleted.
        """
        while self._own_jobs and self._own_jobs[0].submitted_s <= now_s:
            one = self._own_jobs.pop(0)
            if rows := self._fitting(one.requests):
                waiting += len(rows)
                deadline_s = self._deadline_s if one.deadline_s is None else one.deadline_s
                yield from self._submit(rows, one.submitted_s + deadline_s, one.share)
        if self.batch_size is not None:
            if self.num_ended == self.num_submitted and (self._pending or self._refill):
                self._pending = self._pending or self._next_generation()
                rows, self._pending = self._pending[: self.batch_size], self._pending[self.batch_size :]
                yield from self._submit(rows, now_s + self._deadline_s)
            return
        if self.arrives:
            due = bisect_right(self._pending, now_s, key=lambda request: request.arrival_s)
            rows, self._pending = self._pending[:due], self._pending[due:]
            if rows:
                yield from self._submit(rows, now_s + self._deadline_s)
        elif self._pending:
            rows, self._pending = self._pending, []
            waiting += len(rows)
            yield from self._submit(rows, now_s + self._deadline_s)
        if self._refill and self.first_generation_size and waiting < self._low_water:
            rows = []
            while waiting + len(rows) < self._low_water:  # a small set needs several generations to outlast a step
                rows += self._next_generation()
            yield from self._submit(rows, now_s + self._deadline_s)

    def waits_since_s(self, batch_id: str, now_s: float) -> float:
        """Submission time of a job for waiting times: now."""
        return now_s

    def row_ended(self, request_id: str, now_s: float) -> None:
        self.num_ended += 1
        generation, _ = self._jobs[int(request_id[len(OFFLINE_PREFIX) :].partition(":")[0])]
        self._first_open -= generation == 0

    def reached_tokens(self, request_id: str) -> int:
        """Always 0: no other engine has had these rows."""
        return 0

    def output_tokens(self, request_id: str) -> int:
        """The true output length of a row, cut to the context."""
        job, _, row = request_id[len(OFFLINE_PREFIX) :].partition(":")
        request = self._jobs[int(job)][1][int(row)]
        return min(request.output_tokens, self._output_limit(request))

    def _next_generation(self) -> list[TraceRequest]:
        self._generation += 1
        requests = [request for one in self._sets for request in one.refill(self._generation).requests]
        return self._fitting([requests[k] for k in self._order])

    def _submit(self, requests: list[TraceRequest], deadline_s: float, share: str = "") -> Iterator[AddBatch]:
        batch_id = f"{OFFLINE_PREFIX}{len(self._jobs)}"
        self._jobs.append((self._generation, requests))
        self.num_submitted += len(requests)
        yield from as_job(batch_id, requests, self._directory, self._output_limit, deadline_s, share)

    def _fitting(self, requests: list[TraceRequest]) -> list[TraceRequest]:
        return [request for request in requests if request.segments and self._output_limit(request) > 0]


def as_job(
    batch_id: str,
    requests: Sequence[TraceRequest],
    directory: Path,
    output_limit: Callable[[TraceRequest], int],
    deadline_s: float,
    share: str = "",
) -> Iterator[AddBatch]:
    """The message that submits these rows. Their token file is deleted when the next message is requested."""

    def asked_for(request: TraceRequest) -> tuple[int, bool]:
        """``max_tokens``, and whether the answer has exactly this length."""
        limit = output_limit(request)
        return (min(request.output_tokens, limit), True) if request.is_fixed else (limit, False)

    stem = directory / batch_id
    with TokenFileWriter(stem, is_durable=False) as writer:
        for request in requests:
            writer.append(token_ids(request.segments, PROMPT_VOCABULARY))
    write_prefixes(stem, is_durable=False)
    limits = [asked_for(request) for request in requests]
    table = sorted(set(limits))
    index = {limit: k for k, limit in enumerate(table)}
    yield AddBatch(
        batch_id,
        str(stem),
        list(range(len(requests))),
        [SamplingParams(max_tokens=limit, ignore_eos=is_fixed) for limit, is_fixed in table],
        [index[limit] for limit in limits],
        [],
        deadline_s,
        share=share,
    )
    # The engine has mapped the files; their data stay until it unmaps them.
    for path in directory.glob(f"{batch_id}.*"):
        path.unlink()
