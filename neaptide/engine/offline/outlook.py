"""Whether batches will end in their windows, as far as it can be foreseen, and how far their answers are."""

from collections.abc import Iterator, Mapping

from neaptide.engine.messages import BatchOutlook, Outlook
from neaptide.engine.offline.lanes import JobLane
from neaptide.engine.offline.planned import raw
from neaptide.engine.offline.work import WholeDevice, Work
from neaptide.engine.table import RequestTable

PERIOD_S = 1.0
"""Between two reports, unless a batch comes or goes."""
JOBS_AT_ONCE = 32
"""Judged in one call: steps wait for it. Where there are more, a report takes several."""
RECOVERY_SHARE = 0.9
"""Of the time left: a batch that was given up is not hoped for again before it needs no more than this, or a rate that
moves a little would turn every report around."""


class Outlooks:
    """Judges batches in the order of their deadlines; work that comes before a batch is that of those before it that
    can end in time, for the others are given no precedence (``turns``).

    Two questions for each. Could it be in time if it and those had the whole device, without online work, at the rate
    that the cost model promises? If not, it is infeasible: nothing but luck with its answers' lengths will help. Will
    it, at the rate at which offline work was done of late? If not, it is at risk.
    """

    def __init__(self, device: WholeDevice) -> None:
        self._device = device
        self._last: dict[str, Outlook] = {}
        self._reported_at_s: float | None = None
        """None if a report is due at once."""
        self._judging: Iterator[list[BatchOutlook] | None] | None = None
        """Of the report that is being made."""

    def hurry(self) -> None:
        """A batch has come or gone."""
        self._reported_at_s = None

    def report(
        self, jobs: Mapping[str, JobLane], table: RequestTable, rate_tokens_per_s: float | None, now_s: float
    ) -> list[BatchOutlook] | None:
        """The outlook of every batch; None if the last report is recent, or the next one not done, or there was nothing
        to report then either.

        Costs a few operations for each batch and for each row that has started, of so many batches in one call.

        Args:
            rate_tokens_per_s: at which offline work was done of late, None if that is not known.
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
    ) -> Iterator[list[BatchOutlook] | None]:
        """None after some of the batches each, in the end all that are still there."""
        found: list[BatchOutlook] = []
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
            if outlook is not Outlook.INFEASIBLE:
                before = before + own
            if outlook is Outlook.ON_TIME:
                num_tokens_before += own.num_tokens
            answers = job.answers_so_far()
            told = raw(list(answers)), raw(list(answers.values()))
            found.append(BatchOutlook(batch_id, outlook, needed_s, expected_s, job.deadline_s - now_s, *told))
        yield [one for one in found if one.batch_id in jobs]

    def _judge(self, batch_id: str, needed_s: float, expected_s: float | None, left_s: float) -> Outlook:
        last = self._last.get(batch_id, Outlook.ON_TIME)
        if needed_s > left_s * (RECOVERY_SHARE if last is Outlook.INFEASIBLE else 1.0):
            return Outlook.INFEASIBLE
        if expected_s is not None and expected_s > left_s * (1.0 if last is Outlook.ON_TIME else RECOVERY_SHARE):
            return Outlook.AT_RISK
        return Outlook.ON_TIME
