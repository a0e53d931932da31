"""Deadline status of batches: whether they will end in time, as far as it can be foreseen, and the length of their
answers."""

from collections.abc import Iterator, Mapping

from neaptide.engine.messages import BatchDeadlineStatus, DeadlineStatus
from neaptide.engine.offline.lanes import JobLane
from neaptide.engine.offline.planned import raw
from neaptide.engine.offline.work import LeastTime, Work
from neaptide.engine.table import RequestTable

PERIOD_S = 1.0
"""Time between two reports, unless a batch comes or ends."""
JOBS_AT_ONCE = 32
"""Number of batches judged per call, because a step waits for it. More batches take several calls."""
RECOVERY_SHARE = 0.9
"""Hysteresis: a batch that is not on time recovers only when it needs less than this share of the time left. Otherwise
small changes of the rate would flip its status at every report."""


class DeadlineJudge:
    """Judges batches in the order of their deadlines.

    Work ahead of a batch is that of earlier batches that can end in time; the others get no precedence (``turns``).
    Two questions decide:

    - Could it be in time if it and the work ahead had the whole device, at the cost model's rate? If not, it is
      infeasible.
    - Will it be in time at the recent rate of offline work? If not, it is at risk.
    """

    def __init__(self, device: LeastTime) -> None:
        self._device = device
        self._last: dict[str, DeadlineStatus] = {}
        self._reported_at_s: float | None = None
        """None if a report is due at once."""
        self._judging: Iterator[list[BatchDeadlineStatus] | None] | None = None
        """Progress of the current report."""

    def hurry(self) -> None:
        """Makes the next report due at once, because a batch has come or ended."""
        self._reported_at_s = None

    def report(
        self, jobs: Mapping[str, JobLane], table: RequestTable, rate_tokens_per_s: float | None, now_s: float
    ) -> list[BatchDeadlineStatus] | None:
        """Deadline status of every batch; None if the report is not due or not finished, or has nothing to say.

        Takes a few operations per batch and per started line, for ``JOBS_AT_ONCE`` batches per call.

        Args:
            rate_tokens_per_s: recent rate of offline work, None if that is not known.
        """
        if self._judging is None:
            if self._reported_at_s is not None and now_s < self._reported_at_s + PERIOD_S:
                return None
            self._reported_at_s = now_s
            if not jobs and not self._last:
                return None
            self._judging = self._judge_all(jobs, table, rate_tokens_per_s, now_s)
        found = next(self._judging)
        if found is None:
            return None
        self._judging = None
        self._last = {one.batch_id: one.outlook for one in found}
        return found

    def _judge_all(
        self, jobs: Mapping[str, JobLane], table: RequestTable, rate_tokens_per_s: float | None, now_s: float
    ) -> Iterator[list[BatchDeadlineStatus] | None]:
        """Yields None after every few batches, and at the end the status of all that still exist."""
        found: list[BatchDeadlineStatus] = []
        before = Work()
        num_tokens_before = 0
        for number, (batch_id, job) in enumerate(sorted(jobs.items(), key=lambda item: item[1].deadline_s)):
            if number and number % JOBS_AT_ONCE == 0:
                yield None
            own = job.work(table)
            needed_s = self._device.least_seconds(own)
            if before.num_rows:
                needed_s = max(needed_s, self._device.least_seconds(before + own))
            expected_s = None
            if rate_tokens_per_s:
                expected_s = max(needed_s, (num_tokens_before + own.num_tokens) / rate_tokens_per_s)
            outlook = self._judge(batch_id, needed_s, expected_s, job.deadline_s - now_s)
            if outlook is not DeadlineStatus.INFEASIBLE:
                before = before + own
            if outlook is DeadlineStatus.ON_TIME:
                num_tokens_before += own.num_tokens
            answers = job.answers_so_far()
            told = raw(list(answers)), raw(list(answers.values()))
            found.append(BatchDeadlineStatus(batch_id, outlook, needed_s, expected_s, job.deadline_s - now_s, *told))
        yield [one for one in found if one.batch_id in jobs]

    def _judge(self, batch_id: str, needed_s: float, expected_s: float | None, left_s: float) -> DeadlineStatus:
        last = self._last.get(batch_id, DeadlineStatus.ON_TIME)
        if needed_s > left_s * (RECOVERY_SHARE if last is DeadlineStatus.INFEASIBLE else 1.0):
            return DeadlineStatus.INFEASIBLE
        if expected_s is not None and expected_s > left_s * (1.0 if last is DeadlineStatus.ON_TIME else RECOVERY_SHARE):
            return DeadlineStatus.AT_RISK
        return DeadlineStatus.ON_TIME
