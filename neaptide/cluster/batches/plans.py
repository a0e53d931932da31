"""Plans of running batches on shared storage, and this server's copies of them. The functions block."""

import asyncio
import logging
from pathlib import Path

from neaptide.cluster.storage.blobs import Blobs
from neaptide.server.batches.checking.job_files import (
    PLAN_SUFFIXES,
    SEAL_SUFFIX,
    SPARE_SUFFIXES,
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
from neaptide.server.batches.wiring import BatchContext

logger = logging.getLogger(__name__)

KNOWN_PLANS = 8
"""Plans that are kept in memory: a batch's chunks come one after another."""


def put_plan(blobs: Blobs, stem: Path, key: str) -> None:
    """Writes a sealed plan to the storage, file by file, under one key.

    Raises:
        BlobsUnavailableError: some of it is not written.
        FileNotFoundError: a file of the plan is missing here.
    """
    for suffix in PLAN_SUFFIXES:
        path = plan_file(stem, suffix)
        if suffix not in SPARE_SUFFIXES or path.exists():
            blobs.put(path, f"{key}{suffix}")


def remove_plan_blobs(blobs: Blobs, key: str) -> None:
    """Removes a plan from the storage. Raises BlobsUnavailableError."""
    for suffix in PLAN_SUFFIXES:
        blobs.remove(f"{key}{suffix}")


def copy_of_plan(blobs: Blobs, stem: Path, key: str, scratch: Path) -> SealedPlan:
    """Reads the plan at ``stem``; fetches it unless an intact copy of the same plan is there.

    A copy may come from a check that another server's check has overtaken: perhaps the same prompts, under other
    numbers. So the storage's seal decides.

    Raises:
        PlanLostError: the storage has no such plan, or a damaged one.
        OSError: the same may succeed later.
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
                if suffix not in SPARE_SUFFIXES:
                    raise
        return read_sealed_plan(stem)


class PlanCopies:
    """This server's copies of the plans whose chunks it runs. Event loop only."""

    def __init__(self, context: BatchContext, blobs: Blobs, validation: Validation) -> None:
        self._context = context
        self._blobs = blobs
        self._validation = validation
        self._known: dict[str, SealedPlan] = {}

    def forget(self, batch_id: str) -> None:
        self._known.pop(batch_id, None)

    async def get(self, record: BatchRecord, file: FileRecord) -> SealedPlan:
        """The plan: this server's copy, a new copy, or one made again from the input.

        Raises:
            OSError: the same may succeed later.
            PlanLostError: this server cannot have it; others may.
        """
        stem = self._context.stem(record.id)
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
        stem, scratch = self._context.stem(record.id), self._context.files.directory
        return await self._blobs.in_thread(copy_of_plan, self._blobs, stem, record.plan_blob, scratch)

    async def _make_again(self, record: BatchRecord, file: FileRecord) -> SealedPlan:
        """Makes the plan again from the input. It must be the same for every line, for other servers run its lines.

        Raises:
            OSError: the same may succeed later.
            PlanLostError: the check gives another plan here.
        """
        stem = self._context.stem(record.id)
        found = {line.line_no: line for line in await self._validation.make_plan_again(record, file)}
        for line in await self._context.store.read(batch_rows.pending_lines, record.id):
            new = found.get(line.line_no)
            if new is None or (new.first_row, new.num_rows) != (line.first_row, line.num_rows):
                await asyncio.to_thread(remove_plan, stem)
                raise PlanLostError("a new check of its file gives another plan on this server")
        if record.plan_blob is not None:
            await self._blobs.in_thread(put_plan, self._blobs, stem, record.plan_blob)
        return await asyncio.to_thread(read_sealed_plan, stem)
