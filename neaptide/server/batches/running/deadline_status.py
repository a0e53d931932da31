"""Deadline status of live batches, as last reported by the engine, for the API, the metrics and the log."""

import logging
from collections.abc import Sequence

from neaptide.engine.messages import BatchDeadlineStatus, DeadlineStatus

logger = logging.getLogger(__name__)

_CHANGES = {
    DeadlineStatus.INFEASIBLE: (
        logging.WARNING,
        "batch %s cannot end in its window: it needs %.1f s with the whole device, %.1f s at the current rate, and has "
        "%.1f s left; lines that have not ended by then expire. Cancel it or batches that are due before it, or submit "
        "the missing lines again with a longer window",
    ),
    DeadlineStatus.AT_RISK: (
        logging.WARNING,
        "batch %s may not end in its window: it needs %.1f s with the whole device, %.1f s at the current rate, and "
        "has %.1f s left; less online load, or fewer batches that are due before it, would help",
    ),
    DeadlineStatus.ON_TIME: (
        logging.INFO,
        "batch %s can end in its window again: it needs %.1f s with the whole device, %.1f s at the current rate, and "
        "has %.1f s left",
    ),
}


class BatchStatuses:
    """Receives the engine's reports. Event loop only. Batches that it has not reported have no status."""

    def __init__(self) -> None:
        self._latest: dict[str, BatchDeadlineStatus] = {}

    def hear(self, outlooks: Sequence[BatchDeadlineStatus]) -> None:
        """Takes the status of all batches that the engine has."""
        for one in outlooks:
            last = self._latest.get(one.batch_id)
            if one.outlook is not (DeadlineStatus.ON_TIME if last is None else last.outlook):
                level, text = _CHANGES[one.outlook]
                # Until the rate is known, the time on the whole device is used.
                expected_s = one.needed_s if one.expected_s is None else one.expected_s
                logger.log(level, text, one.batch_id, one.needed_s, expected_s, one.left_s)
        self._latest = {one.batch_id: one for one in outlooks}

    def of(self, batch_id: str) -> BatchDeadlineStatus | None:
        return self._latest.get(batch_id)

    def all(self) -> list[BatchDeadlineStatus]:
        """The latest status of every batch that the engine has, the earliest deadline first."""
        return sorted(self._latest.values(), key=lambda one: one.left_s)

    def count(self, outlook: DeadlineStatus) -> int:
        return sum(one.outlook is outlook for one in self._latest.values())
