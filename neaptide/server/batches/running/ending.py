"""Ends a batch whose outcome is decided: its last lines, its files, its status."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from neaptide.server.batches.checking.job_files import remove_plan
from neaptide.server.batches.running import finalize
from neaptide.server.batches.sharing import BatchLease, ResultFiles
from neaptide.server.batches.storing import batch_rows, cost_rows, file_rows, server_rows
from neaptide.server.batches.storing.models import BatchRecord, BatchStatus, LineState
from neaptide.server.batches.wiring import BatchContext

logger = logging.getLogger(__name__)

NUM_WRITERS = 2
"""Threads that write result files. They wait for pages of the database, so they are separate from other threads."""


class Ending:
    """Ends batches. ``stopping`` is set when the server stops; unfinished work is then left to the next start."""

    def __init__(self, context: BatchContext, stopping: threading.Event) -> None:
        self._context = context
        self._stopping = stopping
        self._threads = ThreadPoolExecutor(NUM_WRITERS, "batch-result-files")

    async def end(self, batch_id: str, hold: BatchLease) -> None:
        """Ends the batch. Repeating it gives the same files and status.

        Raises:
            FinalizeStoppedError: the server stops.
            StoreUnavailableError, OSError: a temporary failure.
        """
        store = self._context.store
        if self._stopping.is_set():
            raise finalize.FinalizeStoppedError
        record = await store.read(batch_rows.require_batch, batch_id)
        if not record.is_terminal:
            files = await self._last_files(record, hold)
            await self._finish(record, files, hold)
            logger.info("batch %s: %s", batch_id, record.outcome)
        await asyncio.to_thread(remove_plan, self._context.stem(batch_id))
        await hold.tidy(record)

    async def _finish(self, record: BatchRecord, files: ResultFiles, hold: BatchLease) -> None:
        store, costs, now = self._context.store, self._context.costs, self._context.now(record)
        if costs is None:
            await store.write(hold.guarded(batch_rows.finish_batch), record.id, *files, now)
        else:
            finish = hold.guarded(cost_rows.finish_batch)
            await store.write(finish, record.id, *files, now, costs.run, costs.sums(record.id, now))
            costs.forget(record.id)

    async def _last_files(self, record: BatchRecord, hold: BatchLease) -> ResultFiles:
        store, close_lines = self._context.store, hold.guarded(batch_rows.close_lines)
        if record.in_progress_at is None:
            await store.write(hold.guarded(batch_rows.discard_lines), record.id)
            return None, None
        if record.outcome is BatchStatus.EXPIRED:
            waiting = await store.read(server_rows.waiting, [record.id])
            error = finalize.expired_error(waiting[0].why if waiting else None)
            await store.write(close_lines, record.id, LineState.EXPIRED, error)
        elif record.outcome is BatchStatus.CANCELLED:
            await store.write(close_lines, record.id, LineState.CANCELLED, finalize.CANCELLED_ERROR)
        try:
            return await self._write_files(record, hold)
        except finalize.DamagedLinesError as damage:
            logger.error("batch %s: %s", record.id, damage)
            fail = hold.guarded(batch_rows.fail_damaged_lines)
            await store.write(fail, record.id, damage.line_nos, finalize.DAMAGED_ERROR)
            return await self._write_files(record, hold)

    async def _write_files(self, record: BatchRecord, hold: BatchLease) -> ResultFiles:
        # Reads the record again, because closing the last lines has chosen its file ids.
        record = await self._context.store.read(batch_rows.require_batch, record.id)
        directory, should_stop = self._context.files.directory, self._stopping.is_set
        now, life_s = self._context.now(record), self._context.settings.file_life_s
        try:
            files = await asyncio.get_running_loop().run_in_executor(
                self._threads, finalize.write_files, self._context.store, record, directory, should_stop, now, life_s
            )
        except finalize.NameTakenError as taken:
            logger.warning("batch %s: %s; that file is kept, and the batch gets another name", record.id, taken)
            await self._context.store.write(hold.guarded(file_rows.name_results), record.id)
            return await self._write_files(record, hold)
        return await hold.publish(record, files)
