"""Runs jobs on an engine that may die at any time, by one ordered queue of events with one consumer.

Outputs, engine deaths, new engines, new jobs and closed jobs all pass through the queue. So the outputs of a dead
engine are handled before its successor gets the remaining lines. Results are stored in order of arrival, and a line
whose result is on its way is not run again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from neaptide.engine.messages import EngineReady
from neaptide.engine.params import FinishReason
from neaptide.engine.row_id import RowId
from neaptide.server.batches.planning.planning import MakesPlans, Planning
from neaptide.server.batches.planning.request import JobRows
from neaptide.server.batches.running.events import Add, Close, Event, FeedAgain, NewEngine, Running, settle
from neaptide.server.batches.running.job import NO_ENGINE, Heard, Job
from neaptide.server.batches.running.suspects import LineKey, Suspects
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.models import FileRecord, LineResult
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.deaths import Evidence
from neaptide.server.engine_client.events import BatchOutputs, EngineLost, LineBody, RowOutput
from neaptide.server.http.errors import ApiError, is_passing

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 1.0
MAX_UNDURABLE_RESULTS = 1024
"""Limit of results in memory that are not durable yet. Beyond it, no line runs until the disk has stored some."""
MAX_UNFED_OUTPUTS = 65_536
"""Limit of outputs of a job whose file cannot be read. Beyond it, its lines do not run until it can."""


class JobRunner:
    """Gives jobs to the engine and processes its events. Event loop only; heavy work runs in threads.

    ``on_done`` is called with the id of a job whose last line is durable. ``on_lost`` is called with the id of a job
    whose results are refused or were partly lost here; only the durable results then say which lines are left.
    ``verify`` makes an input file readable again. ``planner`` plans the order of the remaining lines of all jobs, if
    the engine follows one.
    """

    def __init__(
        self,
        store: Store,
        engine: EngineClient,
        describe: Callable[[Job], tuple[Path, float]],
        on_done: Callable[[str], None],
        on_lost: Callable[[str], None],
        verify: Callable[[FileRecord], Awaitable[None]],
        planner: MakesPlans | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._describe = describe
        self._on_done = on_done
        self._on_lost = on_lost
        self._verify = verify
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._jobs: dict[str, Running] = {}
        self._planning = None if planner is None else Planning(planner, engine, self._left_of_all)
        self._suspects = Suspects()
        self._epoch = self._heard_epoch = 0
        """Number of engines so far, and number of those whose start has been handled."""
        self._task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._added_ids: set[str] = set()
        """Jobs whose addition is queued."""
        self._closed_ids: set[str] = set()
        """Jobs whose close is queued."""
        self._stopping = False
        self._suspended = False
        self._num_undurable = 0
        self._disk_behind = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._consume(), name="batch-runner")
        self._engine.line_body = self._line_body
        self._engine.subscribe(BatchOutputs, self._events.put_nowait)
        self._engine.subscribe(EngineLost, self._events.put_nowait)
        self._engine.subscribe(EngineReady, lambda _: self.engine_is_empty())

    async def stop(self) -> None:
        """Makes the results that have arrived durable, then stops listening."""
        self._stopping = True
        # At least one event, so that closes already queued are completed too.
        await asyncio.gather(*(self._post_close(job_id) for job_id in ["", *self._jobs]))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._planning is not None:
            await self._planning.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def suspend(self) -> None:
        """Withdraws all jobs from the engine for good; results on their way still count."""
        self._suspended = True
        self._take_back()

    def _take_back(self) -> None:
        for job_id in self._jobs:
            self._engine.cancel_batch(job_id)

    # ---- events ----

    def engine_is_empty(self) -> None:
        """The engine knows none of the jobs: each is given to it again."""
        self._epoch += 1
        self._events.put_nowait(NewEngine(self._epoch))

    def add_job(self, job: Job) -> None:
        self._added_ids.add(job.id)
        self._events.put_nowait(Add(job))

    def has_job(self, job_id: str) -> bool:
        """Whether the runner has the job: until its last result is durable or it is closed."""
        return job_id in self._jobs or job_id in self._added_ids

    @property
    def jobs(self) -> list[Job]:
        """Jobs that run on the engine."""
        return [running.job for running in self._jobs.values()]

    def _line_body(self, row: RowId) -> LineBody | None:
        running = self._jobs.get(row.batch_id)
        return None if running is None else running.job.line_body(row.row)

    @property
    def num_open(self) -> int:
        """Number of open lines of all jobs."""
        return sum(running.job.num_open for running in self._jobs.values())

    @property
    def is_behind(self) -> bool:
        """Whether results wait for the disk, so that no line runs."""
        return self._disk_behind

    async def close_job(self, job_id: str) -> None:
        """Withdraws the job from the engine; returns when all of its arrived results are durable."""
        if not self._stopping:
            await self._post_close(job_id)

    async def _post_close(self, job_id: str) -> None:
        # Set at once, not when the event is handled: after a cancel, the engine gets nothing more.
        self._closed_ids.add(job_id)
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events.put_nowait(Close(job_id, closed))
        await closed

    # ---- the consumer ----

    async def _consume(self) -> None:
        while True:
            event = await self._events.get()
            try:
                await self._handle(event)
            except Exception:
                # One failed event must not end the queue for all jobs.
                logger.exception("batch runner: an event failed")
                if isinstance(event, Close) and not event.closed.done():
                    event.closed.set_result(None)
                for job_id in self._concerned(event):
                    self._on_lost(job_id)

    def _concerned(self, event: Event) -> set[str]:
        """Jobs whose state is unknown after the event failed."""
        match event:
            case BatchOutputs():
                rows = (RowId.parse(output.request_id) for output in event.outputs)
                return {row.batch_id for row in rows if row is not None}.intersection(self._jobs)
            case NewEngine():
                return set(self._jobs)
            case FeedAgain(running):
                return {running.job.id}
            case Add(job):
                return {job.id}
        return set()

    async def _handle(self, event: Event) -> None:
        match event:
            case BatchOutputs():
                await self._on_outputs(event.outputs)
            case FeedAgain(running):
                running.waits = False
                if self._jobs.get(running.job.id) is running:
                    await self._feed(running)
            case EngineLost(suspects, evidence):
                for running in self._jobs.values():
                    running.job.forget_open()
                    running.unfed.clear()
                self._investigate(suspects, evidence)
            case NewEngine(epoch):
                self._heard_epoch = epoch
                self._suspects.engine_is_empty()
                if self._planning is not None:
                    self._planning.engine_is_new()
                await self._submit_all()
            case Add(job):
                self._added_ids.discard(job.id)
                self._jobs[job.id] = Running(job)
                self._suspects.restore(job.attempts)
                # A first death convicts none: such a line runs beside others once more.
                if max(job.attempts.values(), default=0) > 1 and self._suspects.needs_solitude:
                    self._take_back()
                    self.engine_is_empty()
                await self._submit(job)
            case Close(job_id, closed):
                closed_job = self._jobs.pop(job_id, None)
                self._closed_ids.discard(job_id)
                if closed_job is not None:
                    self._engine.cancel_batch(job_id)
                    await self._end_lines(self._suspects.of_job(job_id))
                # In a task: a disk that refuses one job's results must not delay the others.
                self._spawn(settle(set(closed_job.commits) if closed_job else set(), closed))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit_all(self) -> None:
        for running in list(self._jobs.values()):
            await self._submit(running.job)

    async def _submit(self, job: Job) -> None:
        """Gives the engine the remaining lines of a job in pieces, so that a large job stalls neither side."""
        while self._may_submit(job):
            if job.submitted_epoch != self._epoch:
                job.begin_anew()
            message = job.message(*self._describe(job), self._suspects)
            job.submitted_epoch = self._epoch
            if message is None:
                return
            self._engine.submit_batch(message)
            logger.info("batch %s: %d rows given to the engine", job.id, len(message.rows))
            if self._planning is not None:
                self._planning.grown(len(message.rows))
            await asyncio.sleep(0)

    def _left_of_all(self) -> list[Callable[[], JobRows]]:
        """Functions that return what is left of each job; to be called in a thread."""
        return [partial(one.job.left, self._describe(one.job)[0]) for one in self._jobs.values()]

    def _may_submit(self, job: Job) -> bool:
        # A new engine gets nothing before its own event: only then are the lines that its predecessor died with
        # suspects.
        is_due = self._heard_epoch == self._epoch and self._engine.is_ready
        held_back = job.id in self._closed_ids or self._suspended or self._disk_behind
        # Waiting outputs may contain ends of lines, which would then run again.
        running = self._jobs.get(job.id)
        return is_due and not held_back and not (running is not None and running.waits)

    async def _on_outputs(self, outputs: Sequence[RowOutput]) -> None:
        by_job: dict[str, list[RowOutput]] = {}
        for output in outputs:
            row = RowId.parse(output.request_id)
            if row is not None and row.batch_id in self._jobs:
                by_job.setdefault(row.batch_id, []).append(output)
        for job_id, of_job in by_job.items():
            running = self._jobs.get(job_id)
            if running is None:
                continue  # Its last result has become durable meanwhile.
            running.unfed += of_job
            if not running.waits:
                await self._feed(running)
            elif len(running.unfed) > MAX_UNFED_OUTPUTS and running.job.submitted_epoch == self._epoch:
                # Outputs on their way are still fed. So texts stay complete, and unfinished lines run again.
                self._engine.cancel_batch(job_id)
                running.job.submitted_epoch = NO_ENGINE

    async def _feed(self, running: Running) -> None:
        """Feeds the job its waiting outputs.

        If its file cannot be read, they wait, and later outputs wait after them, because texts depend on the order.
        Other jobs continue.
        """
        job, heard = running.job, Heard(running.unfed)
        try:
            await asyncio.to_thread(job.feed, heard)
        except Exception as error:
            if not is_passing(error):
                running.unfed.clear()
                raise
            logger.error("batch %s: %d outputs wait: %s", job.id, len(running.unfed), error)
            running.waits = True
            self._spawn(self._feed_later(running))
        finally:
            # First, so that the job gives these lines to no engine any more.
            self._commit(running, heard.results)
        if heard.stops:
            self._engine.abort(heard.stops, FinishReason.STOP)
        if heard.results and self._planning is not None:
            self._planning.ended(len(heard.results))
        await self._end_lines([LineKey(job.id, result.line_no) for result in heard.results])
        await self._submit(job)

    async def _feed_later(self, running: Running) -> None:
        await asyncio.sleep(RETRY_DELAY_S)
        with suppress(ApiError, OSError, StoreUnavailableError):  # If this fails, the next attempt fails as well.
            await self._verify(running.job.files.input)
        self._events.put_nowait(FeedAgain(running))

    async def _end_lines(self, lines: Sequence[LineKey]) -> None:
        """Ends lines, which may let suspect lines of any job run."""
        turn = self._suspects.turn
        self._suspects.end(lines)
        if self._suspects.turn != turn:
            await self._submit_all()

    def _investigate(self, step: Sequence[RowId], evidence: Evidence) -> None:
        """Handles an engine death in this step: its lines become suspects, and one of them may be convicted."""
        found = [
            running.job.line_of(row.row) if (running := self._jobs.get(row.batch_id)) is not None else None
            for row in step
        ]
        lines = list(dict.fromkeys(line for line in found if line is not None))
        convict = self._suspects.death(lines, evidence, has_strangers=None in found)
        if convict is not None:
            logger.error("batch %s line %d crashes the engine; it ends with an error", convict.job_id, convict.line_no)
            running = self._jobs[convict.job_id]
            self._commit(running, [running.job.convict(convict.line_no)])
        if evidence is Evidence.EXCUSED:
            return
        by_job: dict[str, list[int]] = {}
        for line in lines:
            by_job.setdefault(line.job_id, []).append(line.line_no)
        for job_id, line_nos in by_job.items():
            self._spawn(self._note_attempts(self._jobs[job_id].job, line_nos))

    async def _note_attempts(self, job: Job, line_nos: list[int]) -> None:
        """Stores the attempts for the next start and for other servers; here the jobs have them."""
        held = None if job.lease is None else job.lease.condition()
        try:
            await self._store.write(batch_rows.count_attempts, job.batch_id, line_nos, held)
        except StoreUnavailableError as error:
            logger.error("batch %s: an engine death could not be stored: %s", job.id, error)

    # ---- durability ----

    def _commit(self, running: Running, results: list[LineResult]) -> None:
        if not results:
            return
        self._num_undurable += len(results)
        if self._num_undurable >= MAX_UNDURABLE_RESULTS and not self._disk_behind:
            logger.error("batches pause: %d results wait for the disk", self._num_undurable)
            self._disk_behind = True
            self._take_back()
        task = asyncio.create_task(self._commit_and_count(running.job, results))
        running.commits.add(task)
        task.add_done_callback(running.commits.discard)

    async def _commit_and_count(self, job: Job, results: list[LineResult]) -> None:
        durable = await self._commit_durably(job, results)
        self._num_undurable -= len(results)
        if self._disk_behind and self._num_undurable < MAX_UNDURABLE_RESULTS // 2:
            logger.info("the disk stores results again; batches continue")
            self._disk_behind = False
            self.engine_is_empty()
        if not durable:
            return
        job.num_undurable -= len(results)
        if job.num_undurable == 0 and job.id in self._jobs:
            del self._jobs[job.id]
            self._on_done(job.id)

    async def _commit_durably(self, job: Job, results: list[LineResult]) -> bool:
        """Whether the results are durable; False if the server stops first or the database refuses them."""
        batch_id = job.batch_id
        while True:
            try:
                if job.lease is None:
                    operation = partial(batch_rows.end_lines, batch_id=batch_id, results=results)
                    await self._store.write_grouped(operation, len(results))
                    return True
                end_leased = partial(batch_rows.end_leased_lines, batch_id=batch_id, lease=job.lease, results=results)
                if await self._store.write_grouped(end_leased, len(results)):
                    return True
                self._on_lost(job.id)
                return False
            except StoreUnavailableError as error:
                # Results are expensive, so memory keeps them until the disk stores them.
                logger.error("batch %s: %d results wait: %s", batch_id, len(results), error)
                if self._stopping:
                    return False
                await asyncio.sleep(RETRY_DELAY_S)
            except Exception:
                logger.exception("batch %s: the database refused results; they will be computed again", batch_id)
                self._on_lost(job.id)
                return False
