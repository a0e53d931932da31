"""The order in which simulated replicas lease rows: the most urgent job first, then from either side of its order.

Rows are leased in memory, and no lease ends: a store's guarantees across processes are not simulated.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from neaptide.cluster.lease_order import Side


class RowLease(NamedTuple):
    job: int
    rows: tuple[int, ...]
    """In the job's order."""


@dataclass(slots=True)
class _OrderedJob:
    deadline_s: float
    runs: deque[tuple[int, ...]] = field(default_factory=deque)
    """Runs of consecutive rows, none empty. Returned rows are a run of their own at the front."""


class RowOrder:
    def __init__(self) -> None:
        self._jobs: dict[int, _OrderedJob] = {}
        self.num_rows = 0
        """Rows that no replica holds."""

    def add(self, job: int, deadline_s: float, rows: Sequence[int]) -> None:
        """Adds a job with its rows by falling compute density."""
        self._jobs[job] = _OrderedJob(deadline_s)
        self.give_back(RowLease(job, tuple(rows)))

    @property
    def first(self) -> int | None:
        """The job that the next chunk comes from."""
        waiting = [(one.deadline_s, job) for job, one in self._jobs.items() if one.runs]
        return min(waiting)[1] if waiting else None

    def lease(self, side: Side, num_rows: int) -> RowLease | None:
        """Takes at most ``num_rows`` rows from this side of the most urgent job; None if nothing is left."""
        job = self.first
        if job is None:
            return None
        runs, from_front = self._jobs[job].runs, side is Side.COMPUTE_BOUND
        run = runs.popleft() if from_front else runs.pop()
        if from_front:
            rows, rest = run[:num_rows], run[num_rows:]
        else:
            cut = max(len(run) - num_rows, 0)
            rows, rest = run[cut:], run[:cut]
        if rest:
            (runs.appendleft if from_front else runs.append)(rest)
        self.num_rows -= len(rows)
        return RowLease(job, rows)

    def give_back(self, lease: RowLease) -> None:
        """Returns rows that their replica will not do; they go first."""
        if lease.rows:
            self._jobs[lease.job].runs.appendleft(lease.rows)
            self.num_rows += len(lease.rows)
