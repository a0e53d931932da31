"""Leases chunks when the engine has use for more lines, renews their leases, and gives them back.

A server loses a lease when it is frozen or cut off for longer than the lease. It notices at the next renewal, or by the
next result. Then the lines leave the engine, and what the engine still says of them is not taken.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from neaptide.cluster.batches import chunk_rows
from neaptide.cluster.batches.chunk_rows import Excluded, FreeChunks, LeasedLines, LeasingServer
from neaptide.cluster.batches.cutting import ChunkWork, work_of
from neaptide.cluster.batches.leased_batch import device_of
from neaptide.cluster.batches.passed_by import PassedBy
from neaptide.cluster.batches.plans import PlanCopies
from neaptide.cluster.lease_order import LEASE_BELOW_LINES, ChunkLease, Side, owners_in_turn, side_to_lease
from neaptide.cluster.storage.blobs import Blobs
from neaptide.engine.messages import EngineReady, Occupancy, StepStats
from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import SealedPlan
from neaptide.server.batches.checking.needs import lacks
from neaptide.server.batches.checking.validation import Validation
from neaptide.server.batches.running import finalize
from neaptide.server.batches.running.background import Background
from neaptide.server.batches.running.job import Job, JobFiles
from neaptide.server.batches.running.job_runner import JobRunner
from neaptide.server.batches.running.plans import watch_tokens
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.database_clock import database_now_ms
from neaptide.server.batches.storing.disk_patience import PatientDisk
from neaptide.server.batches.storing.faults import FileAwayError
from neaptide.server.batches.storing.models import BatchRecord, FileRecord, LineState, PendingLine
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.batches.wiring import BatchContext
from neaptide.server.engine_client.events import EngineLost
from neaptide.server.http.errors import NotFoundError

logger = logging.getLogger(__name__)

RENEWALS_A_LEASE = 3
"""How often a lease is renewed while it lasts."""


class UnableError(Exception):
    """This server cannot run every row of a chunk; a server that was known at the check can."""


@dataclass(slots=True)
class _Held:
    lease: ChunkLease
    job: Job
    work: ChunkWork
    is_over: bool = False
    """All lines have ended, or the lease is being given back: it needs no renewal."""


class LeasedChunks:
    """The chunks that this server's engine works on. Implements ``LeaseFigures``. Event loop only.

    Args:
        lease_s: length of a lease in seconds.
        on_batch_done: called with the id of a batch of which no chunk is left.
        is_validating: whether this server is making a batch's plan anew. Another server has then taken the batch over,
            and this server's copy of the plan cannot be read.
    """

    def __init__(
        self,
        context: BatchContext,
        blobs: Blobs,
        lease_s: float,
        disk: PatientDisk,
        validation: Validation,
        on_batch_done: Callable[[str], None],
        is_validating: Callable[[str], bool],
    ) -> None:
        self._context = context
        self._blobs = blobs
        self._disk = disk
        self._on_batch_done = on_batch_done
        self._is_validating = is_validating
        served, lease_ms = context.compiler.served, int(lease_s * 1000)
        self._lease_s = lease_s
        self.server = LeasingServer(secrets.token_hex(8), served.fingerprint, lease_ms, served.abilities.max_model_len)
        self._runner = JobRunner(
            context.store,
            context.engine,
            self._describe,
            self._on_done,
            self._on_lost,
            context.files.verify,
            context.planner,
        )
        self._held: dict[str, _Held] = {}
        self._loading: set[ChunkLease] = set()
        """Leases whose lines the engine has not got yet: to fetch a plan may take longer than a lease."""
        self._passed_by = PassedBy()
        self._plans = PlanCopies(context, blobs, validation)
        self._background = Background("a chunk is left to the end of its lease")
        self._leasing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._running_rows = 0
        """Offline rows that run in the engine, as it last said."""
        self._silent_s = 0.0
        """How long there has been no engine, as counted at renewals."""
        self._is_suspended = False
        self._is_stopping = False
        self.num_lost = 0
        """Leases that other servers have taken over."""

    # ---- start and stop ----

    def start(self) -> None:
        self._context.engine.subscribe(StepStats, self._on_stats)
        self._context.engine.subscribe(Occupancy, self._on_occupancy)
        self._context.engine.subscribe(EngineReady, lambda _: self.wake())
        self._context.engine.subscribe(EngineLost, self._on_engine_lost)
        self._runner.start()
        self._leasing = self._background.spawn(self._lease_on())
        self._background.spawn(self._renew_on())
        self._background.spawn(watch_tokens(self._runner, self._on_tokens_lost, self._disk))

    async def stop(self) -> None:
        """Makes results durable that have arrived, and gives back the rest."""
        self._is_stopping = True
        self._wake.set()
        if self._leasing is not None:
            # Chunks that have just been leased are given back, too.
            await self._leasing
        await self._runner.stop()
        await self._release([held.lease for held in self._held.values()])
        self._held.clear()
        await self._background.drain()

    def suspend(self) -> None:
        """Leases no more chunks, and gives back what the engine has not done: other servers go on with it at once."""
        self._is_suspended = True
        self._runner.suspend()
        self._background.spawn(self.give_back())

    # ---- figures and events ----

    @property
    def num_chunks(self) -> int:
        return len(self._held)

    def wake(self) -> None:
        """There may be something to lease."""
        self._wake.set()

    def _on_stats(self, stats: StepStats) -> None:
        self._running_rows = stats.running_offline
        if self._has_use_for_more:
            self._wake.set()

    def _on_occupancy(self, occupancy: Occupancy) -> None:
        self._running_rows = occupancy.running_offline

    def _on_engine_lost(self, _: EngineLost) -> None:
        self._running_rows = 0

    def _leaves(self) -> bool:
        return self._is_suspended or self._is_stopping

    @property
    def _has_use_for_more(self) -> bool:
        """Whether fewer lines wait in the engine than it would soon start."""
        engine = self._context.engine
        if self._leaves() or not engine.is_ready or engine.offline_paused:
            return False
        waiting = self._runner.num_open - self._running_rows
        return not self._runner.is_behind and waiting < max(LEASE_BELOW_LINES, self._running_rows)

    # ---- leasing ----

    async def _lease_on(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            try:
                if self._has_use_for_more and await self._lease_some():
                    continue
            except (OSError, StoreUnavailableError) as error:
                logger.error("no chunk is leased: %s", error)
            except Exception:
                # Without this, a server that leases nothing would look idle.
                logger.exception("no chunk is leased")
            # Other servers send no notice of new chunks.
            await self._rest()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(self._context.settings.tick_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _lease_some(self) -> bool:
        """Leases chunks. False if there were none, or not all could be loaded."""
        excluded = self._passed_by.excluded([one.lease.key for one in self._held.values()])
        figures = await self._context.store.read(chunk_rows.free_chunks, self.server, excluded)
        if not figures.num_free:
            await self._disk.sleep(self._context.settings.tick_s)
            return False
        side = self._side_to_lease(figures)
        owners = Counter(held.job.owner for held in self._held.values())
        turns = owners_in_turn(figures.free, owners, figures.chunks_to_lease)
        leases = await self._context.store.write_beside(_lease_chunks, side, turns, self.server, excluded)
        self._loading = set(leases)
        for lease in leases:
            try:
                await self._take_up(lease)
            except (OSError, StoreUnavailableError) as error:
                logger.error("batch %s: a chunk is given back: %s", lease.key.batch_id, error)
                if isinstance(error, OSError) and not isinstance(error, FileAwayError):
                    self._context.files.health.note(error)
                rest = list(self._loading)
                self._loading.clear()
                await self._release(rest)
                await self._disk.sleep(self._context.settings.tick_s)
                return False
            except UnableError as error:
                logger.warning("batch %s: a chunk is left to others: %s", lease.key.batch_id, error)
                await self._pass_by(lease)
            except Exception:
                logger.exception("batch %s: a chunk is left to others", lease.key.batch_id)
                await self._pass_by(lease)
            self._loading.discard(lease)
        return bool(leases)

    async def _pass_by(self, lease: ChunkLease) -> None:
        """Gives a chunk back that this server cannot run, and does not lease it again."""
        self._passed_by.add(lease.key)
        self._loading.discard(lease)
        await self._release([lease])

    def _side_to_lease(self, figures: FreeChunks) -> Side:
        held = [one.work for one in self._held.values()]
        compute_s, memory_s = sum(work.compute_s for work in held), sum(work.memory_s for work in held)
        return side_to_lease(compute_s, memory_s, figures.mean_density)

    async def _take_up(self, lease: ChunkLease) -> None:
        """Hands a leased chunk's lines to the engine.

        Raises:
            OSError, StoreUnavailableError: not possible now.
            UnableError: not possible on this server.
        """
        store, batch_id = self._context.store, lease.key.batch_id
        record = await store.read(batch_rows.require_batch, batch_id)
        lines = await store.read(batch_rows.pending_lines, batch_id, lease.key.chunk_no)
        if record.outcome is not None or self._leaves() or self._is_validating(batch_id):
            self._loading.discard(lease)
            await self._release([lease])
            return
        if not lines:
            self._background.spawn(self._complete(lease))
            return
        try:
            file = await self._context.verify_input(record)
        except NotFoundError:
            logger.error("batch %s: its input file has been dropped", batch_id)
            await store.write(_give_up, lease)
            self._on_batch_done(batch_id)
            return
        job, work = await self._load(record, file, lines, lease)
        if lease not in self._loading:
            return  # lost meanwhile
        self._held[job.id] = _Held(lease, job, work)
        self._runner.add_job(job)
        if self._leaves():
            await self.give_back()

    async def _load(
        self, record: BatchRecord, file: FileRecord, lines: list[PendingLine], lease: ChunkLease
    ) -> tuple[Job, ChunkWork]:
        plan = await self._plans.get(record, file)
        return await asyncio.to_thread(self._read_job, record, file, plan, lines, lease)

    def _read_job(
        self, record: BatchRecord, file: FileRecord, sealed: SealedPlan, lines: list[PendingLine], lease: ChunkLease
    ) -> tuple[Job, ChunkWork]:
        stem = self._context.stem(record.id)
        plan, version = sealed
        tokens = TokenFile(stem)
        if lacking := lacks(self._context.compiler.served, lines, plan, tokens):
            raise UnableError(lacking)
        work = work_of(lines, plan, tokens, device_of(self._context.engine))
        files = JobFiles(file, self._context.files.open_here, stem, version)
        return Job(record, plan, lines, files, self._context.compiler, LeasedLines(lease)), work

    def _describe(self, job: Job) -> tuple[Path, float]:
        return self._context.describe(job.batch_id, job.deadline_at)

    # ---- ending ----

    def _on_done(self, job_id: str) -> None:
        held = self._held.pop(job_id, None)
        if held is not None:
            self._background.spawn(self._complete(held.lease))
        self._wake.set()

    async def _complete(self, lease: ChunkLease) -> None:
        batch_id = lease.key.batch_id
        if await self._disk.retry(batch_id, lambda: self._context.store.write_beside(_complete, lease)):
            self._on_batch_done(batch_id)

    def _on_lost(self, job_id: str) -> None:
        held = self._held.pop(job_id, None)
        if held is None:
            return
        self.num_lost += not held.is_over
        logger.warning("batch %s: a lease is lost: other servers take the lines over, or the batch has ended", job_id)
        self._plans.forget(held.lease.key.batch_id)
        self._background.spawn(self._runner.close_job(job_id))

    async def close_batch(self, batch_id: str) -> None:
        """Takes a batch from the engine. Returns when all results that arrived here are durable."""
        mine = [held for held in self._held.values() if held.lease.key.batch_id == batch_id]
        await self._close(mine)

    def _on_tokens_lost(self, job_id: str) -> None:
        held = self._held.get(job_id)
        if held is not None and not held.is_over:
            self._background.spawn(self.give_back([held]))

    async def give_back(self, held: list[_Held] | None = None) -> None:
        """Gives back unfinished chunks: these, or all of them."""
        held = list(self._held.values()) if held is None else held
        await self._close(held)
        await self._release([one.lease for one in held])

    async def _close(self, held: list[_Held]) -> None:
        for one in held:
            one.is_over = True
        await asyncio.gather(*(self._runner.close_job(one.job.id) for one in held))
        for one in held:
            self._held.pop(one.job.id, None)

    async def _release(self, leases: list[ChunkLease]) -> None:
        if not leases:
            return
        try:
            await self._context.store.write_beside(chunk_rows.release_leases, leases)
        except StoreUnavailableError as error:
            logger.error("%d chunks are free only when their leases end: %s", len(leases), error)

    # ---- leases ----

    async def _renew_on(self) -> None:
        period_s = self._lease_s / RENEWALS_A_LEASE
        while not self._is_stopping:
            try:
                await self._renew()
            except (OSError, StoreUnavailableError) as error:
                logger.error("leases are not renewed: %s", error)
            self._silent_s = 0.0 if self._context.engine.is_ready else self._silent_s + period_s
            if self._held and (self._context.engine.offline_paused or self._silent_s >= self._lease_s):
                self._background.spawn(self.give_back())
            await self._disk.sleep(period_s)

    async def _renew(self) -> None:
        leases = {job_id: held.lease for job_id, held in self._held.items() if not held.is_over}
        loading = self._loading.difference(leases.values())
        if not leases and not loading:
            return
        kept = await self._context.store.write_beside(_renew, [*leases.values(), *loading], self.server.lease_ms)
        for job_id, lease in leases.items():
            if lease not in kept:
                self._on_lost(job_id)
        for lease in loading & self._loading - kept:
            self.num_lost += 1
            self._loading.discard(lease)
            logger.warning("batch %s: a lease is lost before its lines were loaded", lease.key.batch_id)


def _lease_chunks(
    conn: sa.Connection, side: Side, turns: Mapping[str, int], server: LeasingServer, excluded: Excluded
) -> list[ChunkLease]:
    now_ms = database_now_ms(conn)
    leased = (
        chunk_rows.lease_chunks(conn, side, now_ms, limit, server, excluded, owner) for owner, limit in turns.items()
    )
    return [lease for leases in leased for lease in leases]


def _renew(conn: sa.Connection, leases: list[ChunkLease], lease_ms: int) -> set[ChunkLease]:
    return chunk_rows.renew_leases(conn, leases, database_now_ms(conn), lease_ms)


def _complete(conn: sa.Connection, lease: ChunkLease) -> bool:
    """Removes a chunk whose lines have ended. Returns whether the batch has no chunk left."""
    chunk_rows.complete_chunk(conn, lease)
    return chunk_rows.num_chunks(conn, lease.key.batch_id) == 0


def _give_up(conn: sa.Connection, lease: ChunkLease) -> None:
    """Fails the remaining lines of a batch that no server can run; only under a lease of one of its chunks."""
    record = batch_rows.require_batch(conn, lease.key.batch_id)
    if record.outcome is None and LeasedLines(lease).holds(conn):
        batch_rows.close_lines(conn, record.id, LineState.FAILED, finalize.LOST_ERROR)
