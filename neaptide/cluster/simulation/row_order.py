"""The order in which simulated replicas lease rows: the most urgent job first, then from either side of its order.

Rows are leased in memory, and no lease ends: what a store promises across processes is not simulated.
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
class _Job:
    deadline_s: float
    runs: deque[tuple[int, ...]] = field(default_factory=deque)
    """Rows in a row, none empty; what was given back stands at the front, as a run of its own."""


class RowOrder:
    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self.num_rows = 0
        """Not leased."""

    def add(self, job: int, deadline_s: float, rows: Sequence[int]) -> None:
        """A new job, its rows by falling compute density."""
        self._jobs[job] = _Job(deadline_s)
        self.give_back(RowLease(job, tuple(rows)))

    @property
    def first(self) -> int | None:
        """The job that the next lease takes from."""
        waiting = [(one.deadline_s, job) for job, one in self._jobs.items() if one.runs]
        return min(waiting)[1] if waiting else None

    def lease(self, side: Side, num_rows: int) -> RowLease | None:
        """The next rows from this side of the most urgent job, at most ``num_rows``; None if nothing is left."""
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
        """Rows that were leased and will not be done there: they go first."""
        if lease.rows:
            self._jobs[lease.job].runs.appendleft(lease.rows)
            self.num_rows += len(lease.rows)
