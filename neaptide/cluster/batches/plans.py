"""Plans of running batches: their copies on shared storage and on this server. Functions are blocking."""

import asyncio
import logging
from pathlib import Path

from neaptide.cluster.storage.blobs import Blobs
from neaptide.server.batches.checking.job_files import (
    PLAN_SUFFIXES,
    PREFIXES,
    SEAL_SUFFIX,
    PlanLostError,
    SealedPlan,
    plan_faults,
    plan_file,
    read_sealed_plan,
    remove_plan,
    tokens_version,
)
from neaptide.server.batches.checking.validation import Validation
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import BatchRecord, FileRecord
from neaptide.server.batches.wiring import BatchPlane

logger = logging.getLogger(__name__)

KNOWN_PLANS = 8
"""Number of plans kept in memory. Few are enough, as a batch's chunks are leased one after another."""


def put_plan(blobs: Blobs, stem: Path, key: str) -> None:
    """Uploads a sealed plan, file by file, under one key.

    Raises:
        BlobsUnavailableError: not all files were stored.
        FileNotFoundError: a file of the plan is missing here.
    """
    for suffix in PLAN_SUFFIXES:
        path = plan_file(stem, suffix)
        if suffix != PREFIXES or path.exists():
            blobs.put(path, f"{key}{suffix}")


def remove_plan_blobs(blobs: Blobs, key: str) -> None:
    """Removes a plan's blobs. Raises BlobsUnavailableError."""
    for suffix in PLAN_SUFFIXES:
        blobs.remove(f"{key}{suffix}")


def copy_of_plan(blobs: Blobs, stem: Path, key: str, scratch: Path) -> SealedPlan:
    """The plan at ``stem``, downloaded unless an intact copy of the same plan is there.

    The seal always comes from the storage. A local plan may be from a check that another server has replaced since: it
    may have the same prompts under other numbers.

    Raises:
        PlanLostError: the storage does not have the plan, or has a damaged one.
        OSError: not possible now.
    """
    with plan_faults(stem):
        try:
            blobs.fetch(f"{key}{SEAL_SUFFIX}", plan_file(stem, SEAL_SUFFIX), scratch)
            return read_sealed_plan(stem)
        except (FileNotFoundError, PlanLostError):
            remove_plan(stem)
        for suffix in PLAN_SUFFIXES:
            try:
                blobs.fetch(f"{key}{suffix}", plan_file(stem, suffix), scratch)
            except FileNotFoundError:
                # Only the prefix file may be missing: a plan whose prompts share nothing does without.
                if suffix != PREFIXES:
                    raise
        return read_sealed_plan(stem)


class PlanCopies:
    """This server's copies of the plans whose chunks it runs. Event loop only."""

    def __init__(self, plane: BatchPlane, blobs: Blobs, validation: Validation) -> None:
        self._p = plane
        self._blobs = blobs
        self._validation = validation
        self._known: dict[str, SealedPlan] = {}

    def forget(self, batch_id: str) -> None:
        self._known.pop(batch_id, None)

    async def get(self, record: BatchRecord, file: FileRecord) -> SealedPlan:
        """The batch's plan: this server's copy, a new copy, or one made again from the input.

        Raises:
            OSError: not possible now.
            PlanLostError: not possible on this server; others may have the plan.
        """
        stem = self._p.stem(record.id)
        plan = self._known.get(record.id)
        if plan is not None and plan.tokens_version == await asyncio.to_thread(tokens_version, stem):
            return plan
        try:
            plan = await self._fetch(record)
        except PlanLostError as error:
            logger.warning("batch %s: its plan is made again from its input: %s", record.id, error)
            plan = await self._make_again(record, file)
        self.forget(record.id)
        while len(self._known) >= KNOWN_PLANS:
            self._known.pop(next(iter(self._known)))
        self._known[record.id] = plan
        return plan

    async def _fetch(self, record: BatchRecord) -> SealedPlan:
        if record.plan_blob is None:
            raise PlanLostError("the batch names no plan")
        stem, scratch = self._p.stem(record.id), self._p.files.directory
        return await self._blobs.in_thread(copy_of_plan, self._blobs, stem, record.plan_blob, scratch)

    async def _make_again(self, record: BatchRecord, file: FileRecord) -> SealedPlan:
        """Builds the plan again.

        It is accepted only if every line's rows are as before. Other servers may run lines that this one would refuse.
        """
        stem = self._p.stem(record.id)
        found = {line.line_no: line for line in await self._validation.make_plan_again(record, file)}
        for line in await self._p.store.read(batch_rows.pending_lines, record.id):
            new = found.get(line.line_no)
            if new is None or (new.first_row, new.num_rows) != (line.first_row, line.num_rows):
                await asyncio.to_thread(remove_plan, stem)
                raise PlanLostError("a new check of its file gives another plan on this server")
        if record.plan_blob is not None:
            await self._blobs.in_thread(put_plan, self._blobs, stem, record.plan_blob)
        return await asyncio.to_thread(read_sealed_plan, stem)
