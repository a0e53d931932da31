"""The state machine of batches: brings every batch to its end.

 validating ─▶ in_progress ─▶ finalizing ─▶ completed
  │  └────────┬───┘
  ▼           ▼ cancel: cancelling ─▶ cancelled;  overdue: ─▶ expired
 failed

Each arrow is a compare-and-set in the database, made before any other action. So after a restart the records alone say
what is left to do.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec

from neaptide.server.batches.checking.validation import Validation
from neaptide.server.batches.running import finalize
from neaptide.server.batches.running.background import Background
from neaptide.server.batches.running.ending import Ending
from neaptide.server.batches.running.expiry import Expiry, say_what_waits
from neaptide.server.batches.running.job import Job
from neaptide.server.batches.running.job_runner import JobRunner
from neaptide.server.batches.running.plans import Plans, watch_tokens
from neaptide.server.batches.sharing import JobLeft, LeaseFigures
from neaptide.server.batches.sole_lease import SoleLease
from neaptide.server.batches.storing import batch_rows, server_rows
from neaptide.server.batches.storing.disk_patience import PatientDisk
from neaptide.server.batches.storing.models import BatchRecord, BatchStatus, LineState
from neaptide.server.batches.wiring import BatchContext
from neaptide.server.http.errors import NotFoundError

logger = logging.getLogger(__name__)

P = ParamSpec("P")

FIRST_RELOAD_DELAY_S = 10.0
"""First delay of a reload, in which the engine reports the rest of the batch's outputs."""
LONGEST_RELOAD_DELAY_S = 600.0


class StateMachine:
    """State machine of a single server; owns the background tasks of all batches. Implements ``BatchStateMachine``."""

    leases: LeaseFigures | None = None

    def __init__(self, context: BatchContext) -> None:
        self._context = context
        self._runner = JobRunner(
            context.store,
            context.engine,
            self._describe,
            self._on_lines_done,
            self._on_lost,
            context.files.verify,
            context.planner,
        )
        self._attended: Counter[str] = Counter()
        """Number of tasks that work on each batch."""
        self._validating: dict[str, asyncio.Event] = {}
        """Events that stop the validation of each batch."""
        self._loading: set[str] = set()
        self._ended_while_loading: set[str] = set()
        self._reloading: set[str] = set()
        self._num_reloads: Counter[str] = Counter()
        self._finalizing: set[str] = set()
        self._background = Background("a batch cannot continue until the next start")
        self._stopping = threading.Event()
        self._disk = PatientDisk()
        self._hold = SoleLease(context)
        self._validation = Validation(context, self._disk)
        self._plans = Plans(context, self._validation)
        self._ending = Ending(context, self._stopping)
        self._expiry = Expiry(context, self._disk, self.end, look_again=self._look_again)

    # ---- start and stop ----

    async def start(self) -> None:
        records = await self._context.store.read(batch_rows.live_batches)
        await self._context.store.write(server_rows.enrol_alone, self._context.compiler.served)
        say_what_waits(await self._context.store.read(server_rows.waiting))
        self._runner.start()
        for record in records:
            self._take_up(record)
        self._background.spawn(self._expiry.run(self._stopping.is_set))
        self._background.spawn(watch_tokens(self._runner, self._on_lost, self._disk))

    def _take_up(self, record: BatchRecord) -> None:
        if record.outcome is not None:
            self.end(record.id)
        elif record.model_fingerprint not in (None, self._context.compiler.served.fingerprint):
            return  # It waits for a start with its model, or for the end of its window.
        elif record.status is BatchStatus.VALIDATING:
            self.begin(record)
        else:
            self._attend(record.id, self._resume, record.id)

    async def _look_again(self) -> None:
        """Resumes batches that a write of unknown outcome has changed.

        The records are read in a write: once that has happened, no earlier unfinished write can happen any more.
        """
        for record in await self._context.store.write(batch_rows.live_batches):
            is_at_work = self._attended[record.id] > 0 or self._runner.has_job(record.id)
            if record.outcome is not None or not is_at_work:
                self._take_up(record)

    def _attend(self, batch_id: str, step: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        self._attended[batch_id] += 1
        self._background.spawn(self._attended_step(batch_id, lambda: step(*args, **kwargs)))

    async def _attended_step(self, batch_id: str, step: Callable[[], Awaitable[None]]) -> None:
        try:
            await step()
        finally:
            self._attended[batch_id] -= 1
            if not self._attended[batch_id]:
                del self._attended[batch_id]

    async def stop(self) -> None:
        self._stopping.set()
        self._background.close()
        self._disk.stop()
        for validation in self._validating.values():
            validation.set()
        await self._runner.stop()
        await self._background.drain()
        await self._context.checker.close()

    @property
    def waits_for_disk(self) -> bool:
        return self._disk.is_refusing

    # ---- from outside ----

    def begin(self, record: BatchRecord) -> None:
        stop = asyncio.Event()
        self._validating[record.id] = stop
        self._attend(record.id, self._validate, record, stop)

    def end(self, batch_id: str) -> None:
        validation = self._validating.get(batch_id)
        if validation is not None:
            # The validation task notices it and finalizes: only that task knows when its writes are done.
            validation.set()
            return
        if batch_id in self._loading:
            self._ended_while_loading.add(batch_id)
        self._attend(batch_id, self._finalize, batch_id, closes_job=True)

    def suspend(self) -> None:
        """Stops batch work on the engine; running lines run again after the next start."""
        self._runner.suspend()

    # ---- validating ----

    async def _validate(self, record: BatchRecord, stop: asyncio.Event) -> None:
        try:
            begun = await self._validation.run(record, stop, self._hold)
        finally:
            # In any case: a cancel or an expiry must not wait for this task.
            del self._validating[record.id]
        if stop.is_set():
            await self._finalize(record.id)
        elif begun:
            await self._resume(record.id)

    # ---- running ----

    async def _resume(self, batch_id: str) -> None:
        """Gives the open lines of a batch in progress to the runner."""
        self._loading.add(batch_id)
        try:
            job = await self._disk.retry(batch_id, lambda: self._load(batch_id))
            if job is None:
                self._on_lines_done(batch_id)
            # Cancelled or overdue since, and perhaps ended: the engine must not get it any more.
            elif batch_id not in self._ended_while_loading:
                self._runner.add_job(job)
        finally:
            self._loading.discard(batch_id)
            self._ended_while_loading.discard(batch_id)

    def _on_lost(self, batch_id: str) -> None:
        if batch_id not in self._reloading:
            self._reloading.add(batch_id)
            self._attend(batch_id, self._reload, batch_id)

    async def _reload(self, batch_id: str) -> None:
        """Reloads a batch whose results were partly lost; its records say which lines are left."""
        try:
            await self._runner.close_job(batch_id)
            # The delay grows, because results of other lines of the batch that arrive meanwhile count, while aborted
            # ones do not.
            delay_s = min(FIRST_RELOAD_DELAY_S * 2.0 ** min(self._num_reloads[batch_id], 10), LONGEST_RELOAD_DELAY_S)
            self._num_reloads[batch_id] += 1
            await self._disk.sleep(delay_s)
            # A later loss causes another reload.
            self._reloading.discard(batch_id)
            if not self._stopping.is_set():
                await self._resume(batch_id)
        finally:
            self._reloading.discard(batch_id)

    async def _load(self, batch_id: str) -> Job | None:
        """The job of the open lines; None if no line is left or can run any more."""
        record = await self._context.store.read(batch_rows.require_batch, batch_id)
        lines = await self._context.store.read(batch_rows.pending_lines, batch_id)
        if self._context.costs is not None:
            self._context.costs.watch(record)
        if not lines or record.outcome is not None:
            return None
        try:
            return await self._plans.load(record, lines)
        except NotFoundError:
            logger.error("batch %s: its input file has been dropped", batch_id)
            await self._context.store.write(batch_rows.close_lines, batch_id, LineState.FAILED, finalize.LOST_ERROR)
            return None

    def _describe(self, job: Job) -> tuple[Path, float]:
        return self._context.describe(job.batch_id, job.deadline_at)

    def _on_lines_done(self, batch_id: str) -> None:
        self._attend(batch_id, self._complete, batch_id)

    # ---- ending ----

    async def _complete(self, batch_id: str) -> None:
        async def begin() -> bool:
            record = await self._context.store.read(batch_rows.require_batch, batch_id)
            return await self._context.store.write(batch_rows.begin_finalizing, batch_id, self._context.now(record))

        # False: a cancel or an expiry came first, and that decision finalizes.
        if await self._disk.retry(batch_id, begin):
            await self._finalize(batch_id)

    async def _finalize(self, batch_id: str, closes_job: bool = False) -> None:
        """Ends a batch whose outcome is decided; later calls do nothing."""
        if batch_id in self._finalizing:
            return
        self._finalizing.add(batch_id)
        try:
            if closes_job:
                await self._runner.close_job(batch_id)
            await self._disk.retry(batch_id, lambda: self._ending.end(batch_id, self._hold))
        except finalize.FinalizeStoppedError:
            return
        finally:
            self._finalizing.discard(batch_id)

    async def expire_overdue(self) -> None:
        await self._expiry.expire_overdue()

    async def backlog(self) -> list[JobLeft]:
        """As in ``BatchStateMachine``: a single server shares nothing."""
        return []
