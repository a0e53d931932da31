"""Tracks the offline rows of a simulation."""

import math


class RowLedger:
    """The rows of every job: submission time, and which have started or ended."""

    def __init__(self) -> None:
        self._submitted_s: dict[str, float] = {}
        self._deadline_s: dict[str, float] = {}
        self._num_rows: dict[str, int] = {}
        self._open: dict[str, int] = {}
        """Job -> rows that have not ended."""
        self._unstarted: dict[str, int] = {}
        """Job -> rows that have not started."""
        self._started_ids: set[str] = set()
        """Rows between their first step and their end."""
        self._num_late = 0

    def submitted(self, job: str, num_rows: int, now_s: float, deadline_s: float) -> None:
        self._submitted_s[job], self._deadline_s[job] = now_s, deadline_s
        self._num_rows[job] = self._open[job] = self._unstarted[job] = num_rows

    def has_started(self, request_id: str) -> bool:
        """Whether the row has started and not ended."""
        return request_id in self._started_ids

    def started(self, request_id: str, now_s: float) -> float:
        """Records a row's start. Returns how long it has waited."""
        job = _job_of(request_id)
        self._unstarted[job] -= 1
        self._started_ids.add(request_id)
        return now_s - self._submitted_s[job]

    def ended(self, request_id: str, now_s: float) -> None:
        job = _job_of(request_id)
        self._open[job] -= 1
        if request_id in self._started_ids:
            self._started_ids.remove(request_id)
        else:
            self._unstarted[job] -= 1
        self._num_late += now_s > self._deadline_s[job]

    def withdraw_unstarted(self) -> list[str]:
        """Removes and returns the jobs of which no row has started or ended."""
        jobs = [job for job, rows in self._unstarted.items() if rows == self._num_rows[job]]
        for job in jobs:
            for of_jobs in (self._submitted_s, self._deadline_s, self._num_rows, self._open, self._unstarted):
                del of_jobs[job]
        return jobs

    def longest_wait_s(self, end_s: float) -> float:
        """Longest wait of rows that have not started; minus infinity if all have."""
        waits = (end_s - self._submitted_s[job] for job, rows in self._unstarted.items() if rows)
        return max(waits, default=-math.inf)

    def misses(self, end_s: float) -> int:
        """Rows that ended after their deadline, and open rows past it."""
        late = (job for job, deadline_s in self._deadline_s.items() if end_s > deadline_s)
        return self._num_late + sum(self._open[job] for job in late)

    @property
    def has_jobs(self) -> bool:
        return bool(self._submitted_s)


def _job_of(request_id: str) -> str:
    return request_id.partition(":")[0]
