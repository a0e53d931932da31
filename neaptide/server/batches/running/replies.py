"""The stored replies' forms of a running job: read where they are sound, else left to the input file."""

import logging
from pathlib import Path

from neaptide.server.batches.checking.job_files import REPLIES, JobPlan, PlanLostError, plan_faults, plan_file
from neaptide.server.batches.checking.reply_records import MAX_SHARED_BYTES, VERSION, ReplyPlaces

logger = logging.getLogger(__name__)

MAX_KEPT = 64
"""Records in memory, of at most ``MAX_SHARED_BYTES`` each: the lines of most jobs share a few."""


class StoredReplies:
    """Records of one job. One thread at a time."""

    def __init__(self, stem: Path, plan: JobPlan) -> None:
        self._stem = stem
        self._places = ReplyPlaces(plan.reply_places if plan.replies_version == VERSION else b"")
        self._kept: dict[int, bytes] = {}
        """By where they stand."""
        self._has_warned = False

    def record(self, row: int) -> bytes | None:
        """What was stored for the line that begins with this row; None where nothing usable is.

        Raises:
            OSError: the storage is away.
        """
        place = self._places.of(row)
        if place is None:
            return None
        record = self._kept.get(place.offset)
        if record is not None:
            return record
        try:
            with plan_faults(self._stem):
                record = place.read(plan_file(self._stem, REPLIES))
        except PlanLostError as error:
            self.note_unusable(error)
            return None
        if len(record) <= MAX_SHARED_BYTES and len(self._kept) < MAX_KEPT:
            self._kept[place.offset] = record
        return record

    def note_unusable(self, error: Exception) -> None:
        """Says once that lines of the job are prepared a second time."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("batch %s: lines are prepared again from the input: %s", self._stem.name, error)
