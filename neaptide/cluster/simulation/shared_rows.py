"""One pool of offline rows for several simulated engines. They take chunks of it, and every row is done once."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from neaptide.cluster.autoscaling import Backlog
from neaptide.cluster.lease_order import LEASE_BELOW_LINES, lines_to_lease, side_to_lease
from neaptide.cluster.simulation.row_order import RowLease, RowOrder
from neaptide.engine.arrays import FloatArray
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.planning.blend import Ranked, rank
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.offline_feed import OFFLINE_PREFIX, as_job
from neaptide.simulation.pools.planned import pool_of
from neaptide.simulation.scenario import Scenario


@dataclass(slots=True)
class _Job:
    arrival_s: float
    deadline_s: float
    requests: Sequence[TraceRequest]
    ranked: Ranked
    compute_s: FloatArray
    """[rows] after sharing with the job's other rows."""
    memory_s: FloatArray
    generation: int
    is_done: list[bool]
    num_open: int
    reached_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens that each row had reached in a replica that was lost."""


class SharedRows:
    """The offline sets of a scenario as jobs: one job of all rows there at the start, and one of the rows of each later
    arrival time.

    Raises:
        ValueError: a set is submitted in batches, is a job of its own or cannot be refilled, or no request fits.
    """

    def __init__(self, scenario: Scenario, low_water: int) -> None:
        self._scenario = scenario
        sets = scenario.offline
        if any(one.batch_size is not None for one in sets):
            raise ValueError("a set that is submitted in batches keeps one engine busy: replicas cannot share it")
        if any(one.is_job for one in sets):
            raise ValueError(
                "placement leases does not support jobs with shares and submissions yet: use placement partition"
            )
        rows = self._fitting(0)
        if sets and not rows:
            raise ValueError("no offline request fits into the context")
        self.num_left_out = sum(len(one.requests) for one in sets) - len(rows)
        self.num_cut = sum(row.output_tokens > scenario.output_limit(row) for row in rows)
        self.arrives = any(row.arrival_s > 0 for row in rows)
        self._refills = scenario.refill and bool(rows) and not self.arrives
        if self._refills:
            for one in sets:
                one.check_refill()
        self._low_water = max(low_water, len(rows) // 2)
        self._order = RowOrder()
        self._jobs: list[_Job] = []
        self._coming = sorted({row.arrival_s for row in rows}, reverse=True)
        self._rows_at = {at_s: [row for row in rows if row.arrival_s == at_s] for at_s in self._coming}
        self._generation = 0
        self.first_generation_size = self._first_open = len(rows)
        self.num_servers = 0
        """Replicas that take rows."""
        self.num_done = 0
        self.num_given_back = 0
        """Rows that were returned, counted each time."""
        self._num_late = 0

    def _fitting(self, generation: int) -> list[TraceRequest]:
        sets = self._scenario.offline
        taken = [one.refill(generation) for one in sets] if generation else sets
        return [r for one in taken for r in one.requests if r.segments and self._scenario.output_limit(r) > 0]

    # ---- arrivals ----

    @property
    def next_arrival_s(self) -> float:
        return self._coming[-1] if self._coming else math.inf

    def arrive(self, now_s: float) -> None:
        """Adds the jobs that are due, and refills a pool that runs low."""
        while self._coming and self._coming[-1] <= now_s:
            at_s = self._coming.pop()
            self._add(at_s, self._rows_at.pop(at_s), None)
        while self._refills and self._order.num_rows < self._low_water:
            self._generation += 1
            self._add(now_s, self._fitting(self._generation), self._jobs[0])

    def _add(self, now_s: float, rows: list[TraceRequest], like: _Job | None) -> None:
        """Adds a job. ``like`` is a job of the same shape, whose order is reused."""
        if like is None:
            pool = pool_of(rows, self._scenario.profile)
            ranked = rank(pool.tree, pool.work)
            compute_s, memory_s = np.empty(len(rows)), np.empty(len(rows))
            compute_s[ranked.rows], memory_s[ranked.rows] = ranked.compute_s, ranked.memory_s
        else:
            ranked, compute_s, memory_s = like.ranked, like.compute_s, like.memory_s
        deadline_s = now_s + self._scenario.offline_deadline_s
        is_done = [False] * len(rows)
        job = _Job(now_s, deadline_s, rows, ranked, compute_s, memory_s, self._generation, is_done, len(rows))
        self._order.add(len(self._jobs), deadline_s, ranked.rows.tolist())
        self._jobs.append(job)

    # ---- state ----

    @property
    def num_unleased(self) -> int:
        return self._order.num_rows

    @property
    def first_generation_done(self) -> bool:
        return not self._first_open

    @property
    def num_open(self) -> int:
        """Rows that have arrived and are not done."""
        return sum(job.num_open for job in self._jobs)

    def backlog(self) -> list[Backlog]:
        """The least device time that every unfinished job still takes."""
        found = []
        for job in self._jobs:
            if job.num_open:
                left = ~np.array(job.is_done)
                work_s = max(float(job.compute_s[left].sum()), float(job.memory_s[left].sum()))
                found.append(Backlog(job.deadline_s, work_s))
        return found

    def misses(self, end_s: float) -> int:
        """Rows that ended late, and unfinished rows that are late."""
        return self._num_late + sum(job.num_open for job in self._jobs if end_s > job.deadline_s)

    def longest_wait_s(self, end_s: float) -> float:
        """Longest wait of the rows that no replica holds; minus infinity if there is none."""
        first = self._order.first
        return end_s - self._jobs[first].arrival_s if first is not None else -math.inf

    # ---- for replicas ----

    def lease(self, compute_s: float, memory_s: float) -> RowLease | None:
        """Rows for a replica that holds this much work, from the end that moves it towards the job's density."""
        number = self._order.first
        if number is None:
            return None
        side = side_to_lease(compute_s, memory_s, self._jobs[number].ranked.root_density)
        return self._order.lease(side, lines_to_lease(self._order.num_rows, self.num_servers))

    def work_s(self, job: int, row: int) -> tuple[float, float]:
        """Compute and memory time of a row."""
        one = self._jobs[job]
        return float(one.compute_s[row]), float(one.memory_s[row])

    def request(self, job: int, row: int) -> TraceRequest:
        return self._jobs[job].requests[row]

    def times_s(self, job: int) -> tuple[float, float]:
        """Arrival and deadline."""
        return self._jobs[job].arrival_s, self._jobs[job].deadline_s

    def done(self, job: int, row: int, now_s: float) -> None:
        one = self._jobs[job]
        assert not one.is_done[row], f"row {row} of job {job} is done for the second time"
        one.is_done[row] = True
        one.num_open -= 1
        self.num_done += 1
        self._num_late += now_s > one.deadline_s
        self._first_open -= one.generation == 0

    def lost(self, job: int, row: int, reached_tokens: int) -> None:
        """Records how far a lost replica had come with a row."""
        reached = self._jobs[job].reached_tokens
        reached[row] = max(reached.get(row, 0), reached_tokens)

    def reached_tokens(self, job: int, row: int) -> int:
        return self._jobs[job].reached_tokens.get(row, 0)

    def give_back(self, lease: RowLease) -> None:
        """Returns the unfinished rows of a lease that its replica will not do."""
        left = RowLease(lease.job, tuple(row for row in lease.rows if not self._jobs[lease.job].is_done[row]))
        self.num_given_back += len(left.rows)
        self._order.give_back(left)


class LeasedRows:
    """The rows that one replica holds. Implements ``RowSource``."""

    def __init__(self, shared: SharedRows, scenario: Scenario, directory: Path) -> None:
        self._shared = shared
        shared.num_servers += 1
        self._scenario = scenario
        self._directory = directory
        self._leases: dict[int, RowLease] = {}
        """Claims by the number in the job's id; returned ones are removed."""
        self._num_leases = 0
        self._held_s = [0.0, 0.0]
        """Compute and memory time of rows held and not done."""
        self._is_closed = False
        """It takes no more rows."""

    @property
    def may_be_empty(self) -> bool:
        return self._is_closed or self._shared.arrives or self._shared.num_unleased > 0

    @property
    def next_arrival_s(self) -> float:
        return math.inf  # the cluster wakes its replicas

    @property
    def first_generation_done(self) -> bool:
        return self._shared.first_generation_done

    def messages(self, waiting: int, now_s: float) -> Iterator[AddBatch]:
        self._shared.arrive(now_s)
        while not self._is_closed and waiting < LEASE_BELOW_LINES:
            lease = self._shared.lease(*self._held_s)
            if lease is None:
                return
            waiting += len(lease.rows)
            yield from self._submit(lease)

    def waits_since_s(self, batch_id: str, now_s: float) -> float:
        return self._shared.times_s(self._leases[_number(batch_id)].job)[0]

    def row_ended(self, request_id: str, now_s: float) -> None:
        job, row = self._row(request_id)
        self._hold(job, row, -1.0)
        self._shared.done(job, row, now_s)

    def output_tokens(self, request_id: str) -> int:
        request = self._shared.request(*self._row(request_id))
        return min(request.output_tokens, self._scenario.output_limit(request))

    def reached_tokens(self, request_id: str) -> int:
        return self._shared.reached_tokens(*self._row(request_id))

    def close(self) -> None:
        """Stops taking rows; the rows it holds will still be done."""
        self._is_closed = True
        self._shared.num_servers -= 1

    def give_back(self, batch_ids: Sequence[str]) -> None:
        for batch_id in batch_ids:
            self._shared.give_back(self._leases.pop(_number(batch_id)))

    def give_back_all(self, reached_tokens: Callable[[str], int]) -> None:
        """Returns all rows of a lost replica, and records how far each had come."""
        for number, lease in self._leases.items():
            for place, row in enumerate(lease.rows):
                if reached := reached_tokens(f"{OFFLINE_PREFIX}{number}:{place}"):
                    self._shared.lost(lease.job, row, reached)
        self.give_back([f"{OFFLINE_PREFIX}{number}" for number in list(self._leases)])

    def _submit(self, lease: RowLease) -> Iterator[AddBatch]:
        number, self._num_leases = self._num_leases, self._num_leases + 1
        self._leases[number] = lease
        for row in lease.rows:
            self._hold(lease.job, row, 1.0)
        requests = [self._shared.request(lease.job, row) for row in lease.rows]
        deadline_s = self._shared.times_s(lease.job)[1]
        limit = self._scenario.output_limit
        yield from as_job(f"{OFFLINE_PREFIX}{number}", requests, self._directory, limit, deadline_s)

    def _hold(self, job: int, row: int, sign: float) -> None:
        for k, seconds in enumerate(self._shared.work_s(job, row)):
            self._held_s[k] += sign * seconds

    def _row(self, request_id: str) -> tuple[int, int]:
        batch_id, _, row = request_id.partition(":")
        lease = self._leases[_number(batch_id)]
        return lease.job, lease.rows[int(row)]


def _number(batch_id: str) -> int:
    return int(batch_id[len(OFFLINE_PREFIX) :])
