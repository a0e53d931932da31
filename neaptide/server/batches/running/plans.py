"""Plans of running batches: read if they are intact, otherwise made again from the input."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import sqlalchemy as sa

from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import PlanLostError, read_sealed_plan
from neaptide.server.batches.checking.needs import lacks
from neaptide.server.batches.checking.validation import Validation
from neaptide.server.batches.running.job import Job, JobFiles
from neaptide.server.batches.running.job_runner import JobRunner
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.disk_patience import PatientDisk
from neaptide.server.batches.storing.models import BatchRecord, FileRecord, NewLine, PendingLine
from neaptide.server.batches.storing.tables import batch_lines
from neaptide.server.batches.wiring import BatchContext

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time between two checks of running jobs' token files."""


class Plans:
    """Plans of a server that shares its batches with no other."""

    def __init__(self, context: BatchContext, validation: Validation) -> None:
        self._context = context
        self._validation = validation

    async def load(self, record: BatchRecord, lines: list[PendingLine]) -> Job | None:
        """A job of these lines; None if a plan made again has none of them.

        Raises:
            NotFoundError: the input file has no record any more.
            OSError, StoreUnavailableError: a temporary failure.
        """
        file = await self._context.verify_input(record)
        try:
            return await asyncio.to_thread(self._read, record, file, lines)
        except PlanLostError as error:
            logger.warning("batch %s: its plan is made again from its input: %s", record.id, error)
        found = await self._validation.make_plan_again(record, file)
        await self._context.store.write(renumber_lines, record.id, found)
        lines = await self._context.store.read(batch_rows.pending_lines, record.id)
        return await asyncio.to_thread(self._read, record, file, lines) if lines else None

    def _read(self, record: BatchRecord, file: FileRecord, lines: list[PendingLine]) -> Job:
        stem = self._context.stem(record.id)
        plan, version = read_sealed_plan(stem)
        tokens, served = TokenFile(stem), self._context.compiler.served
        if lacking := lacks(served, lines, plan, tokens):
            able = [line for line in lines if not lacks(served, [line], plan, tokens)]
            logger.warning("batch %s: %d lines wait for another server: %s", record.id, len(lines) - len(able), lacking)
            lines = able
        return Job(
            record, plan, lines, JobFiles(file, self._context.files.open_here, stem, version), self._context.compiler
        )


def renumber_lines(conn: sa.Connection, batch_id: str, lines: Sequence[NewLine]) -> None:
    """Updates the open lines from a plan that was made again; lines that it refuses end with its error."""
    known = {line.line_no: line for line in batch_rows.pending_lines(conn, batch_id)}
    refused = [line.result for line in lines if line.line_no in known and line.result is not None]
    for line in lines:
        old = known.get(line.line_no)
        if old is None or line.result is not None or (old.first_row, old.num_rows) == (line.first_row, line.num_rows):
            continue
        where = (batch_lines.c.batch_id == batch_id, batch_lines.c.line_no == line.line_no)
        conn.execute(batch_lines.update().where(*where).values(first_row=line.first_row, num_rows=line.num_rows))
    if refused:
        batch_rows.end_lines(conn, batch_id, refused)


async def watch_tokens(runner: JobRunner, on_lost: Callable[[str], None], disk: PatientDisk) -> None:
    """Calls ``on_lost`` with every job whose token file is missing or replaced, for which the engine would wait in
    vain.

    Ends when ``disk`` is stopped.
    """
    while not disk.is_stopped:
        await disk.sleep(LOOK_S)
        for job_id in await asyncio.to_thread(_without_tokens, runner.jobs):
            logger.warning("batch %s: its token file is lost", job_id)
            on_lost(job_id)


def _without_tokens(jobs: Sequence[Job]) -> list[str]:
    return [job.id for job in jobs if job.files.have_lost_tokens]
