"""Chunks that this server's engine works on: leases them, renews the leases, and gives chunks back.

A server that was frozen or cut off for longer than a lease has lost it. It finds out at the next renewal or result. The
lines then leave the engine, and their later results are ignored.
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
from neaptide.cluster.batches.chunk_rows import Besides, BoardFigures, Claimant, LeasedLines
from neaptide.cluster.batches.cutting import Work, work_of
from neaptide.cluster.batches.leased_batch import device_of
from neaptide.cluster.batches.passed_by import PassedBy
from neaptide.cluster.batches.plans import PlanCopies
from neaptide.cluster.lease_order import CLAIM_BELOW_LINES, Claim, End, end_to_take, owners_in_turn
from neaptide.cluster.storage.blobs import Blobs
from neaptide.engine.messages import Occupancy, StepStats
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
from neaptide.server.batches.wiring import BatchPlane
from neaptide.server.edge.errors import NotFoundError

logger = logging.getLogger(__name__)

RENEWALS_A_LEASE = 3


class UnableError(Exception):
    """This server cannot run some of a chunk's rows. Some server that was known when they were checked can."""


@dataclass(slots=True)
class _Held:
    claim: Claim
    job: Job
    work: Work
    is_over: bool = False
    """All lines have ended, or the chunk is being given back: the lease is not renewed."""


class Claimer:
    """Leases chunks for this server's engine. Event loop only.

    Args:
        on_batch_done: called with the id of a batch that has no chunk left.
        is_validating: whether this server is checking a batch, whose new plan then lies in the place of a copy. Chunks
            of such a batch are given back: another server has finished the check.
    """

    def __init__(
        self,
        plane: BatchPlane,
        blobs: Blobs,
        lease_s: float,
        disk: PatientDisk,
        validation: Validation,
        on_batch_done: Callable[[str], None],
        is_validating: Callable[[str], bool],
    ) -> None:
        self._p = plane
        self._blobs = blobs
        self._disk = disk
        self._on_batch_done = on_batch_done
        self._is_validating = is_validating
        served, lease_ms = plane.compiler.served, int(lease_s * 1000)
        self._lease_s = lease_s
        self.claimant = Claimant(secrets.token_hex(8), served.fingerprint, lease_ms, served.abilities.max_model_len)
        self._runner = JobRunner(
            plane.store, plane.engine, self._describe, self._on_done, self._on_lost, plane.files.verify, plane.planner
        )
        self._held: dict[str, _Held] = {}
        self._loading: set[Claim] = set()
        """Leases whose lines the engine does not have yet. They are renewed too, as a plan may take longer to fetch
        than a lease."""
        self._passed_by = PassedBy()
        self._plans = PlanCopies(plane, blobs, validation)
        self._background = Background("a chunk is left to the end of its lease")
        self._claiming: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._running_rows = 0
        """Rows running in the engine, by its last report."""
        self._silent_s = 0.0
        """Time without an engine, as counted by renewals."""
        self._is_suspended = False
        self._is_stopping = False
        self.num_lost = 0
        """Number of leases lost to other servers."""

    # ---- start and stop ----

    def start(self) -> None:
        self._p.engine.add_stats_listener(self)
        self._p.engine.add_engine_listener(self)
        self._runner.start()
        self._claiming = self._background.spawn(self._claim_on())
        self._background.spawn(self._renew_on())
        self._background.spawn(watch_tokens(self._runner, self._on_tokens_lost, self._disk))

    async def stop(self) -> None:
        """Stores the results that have arrived, and gives the rest back."""
        self._is_stopping = True
        self._wake.set()
        if self._claiming is not None:
            # What has just been leased is given back too.
            await self._claiming
        await self._runner.stop()
        await self._release([held.claim for held in self._held.values()])
        self._held.clear()
        await self._background.drain()

    def suspend(self) -> None:
        """Leases no more and gives back what the engine has not done, so that others continue at once."""
        self._is_suspended = True
        self._runner.suspend()
        self._background.spawn(self.give_back())

    # ---- what is asked ----

    @property
    def num_chunks(self) -> int:
        return len(self._held)

    def wake(self) -> None:
        """Looks for free chunks now."""
        self._wake.set()

    def on_stats(self, stats: StepStats) -> None:
        self._running_rows = stats.running_offline
        if self._has_use_for_more:
            self._wake.set()

    def on_occupancy(self, occupancy: Occupancy) -> None:
        self._running_rows = occupancy.running_offline

    def on_engine_ready(self) -> None:
        self._wake.set()

    def on_engine_lost(self) -> None:
        self._running_rows = 0

    def _leaves(self) -> bool:
        return self._is_suspended or self._is_stopping

    @property
    def _has_use_for_more(self) -> bool:
        """Whether fewer lines wait in the engine than it will start soon."""
        engine = self._p.engine
        if self._leaves() or not engine.is_ready or engine.offline_paused:
            return False
        waiting = self._runner.num_open - self._running_rows
        return not self._runner.is_behind and waiting < max(CLAIM_BELOW_LINES, self._running_rows)

    # ---- claiming ----

    async def _claim_on(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            try:
                if self._has_use_for_more and await self._claim_some():
                    continue
            except (OSError, StoreUnavailableError) as error:
                logger.error("chunks cannot be leased: %s", error)
            except Exception:
                # Without this message, a server that leases nothing would look idle.
                logger.exception("chunks cannot be leased")
            # Chunks offered by other servers are found by polling.
            await self._rest()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(self._p.settings.tick_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _claim_some(self) -> bool:
        """Returns whether there were free chunks, and all of them were loaded."""
        besides = self._passed_by.beside([one.claim.key for one in self._held.values()])
        figures = await self._p.store.read(chunk_rows.board_figures, self.claimant, besides)
        if not figures.num_free:
            await self._disk.sleep(self._p.settings.tick_s)
            return False
        end = self._end_to_take(figures)
        owners = Counter(held.job.owner for held in self._held.values())
        turns = owners_in_turn(figures.free, owners, figures.chunks_to_claim)
        claims = await self._p.store.write_beside(_claim, end, turns, self.claimant, besides)
        self._loading = set(claims)
        for claim in claims:
            try:
                await self._take_up(claim)
            except (OSError, StoreUnavailableError) as error:
                logger.error("batch %s: a chunk is given back: %s", claim.key.batch_id, error)
                if isinstance(error, OSError) and not isinstance(error, FileAwayError):
                    self._p.files.health.note(error)
                rest = list(self._loading)
                self._loading.clear()
                await self._release(rest)
                await self._disk.sleep(self._p.settings.tick_s)
                return False
            except UnableError as error:
                logger.warning("batch %s: a chunk is left to others: %s", claim.key.batch_id, error)
                await self._pass_by(claim)
            except Exception:
                logger.exception("batch %s: a chunk is left to others", claim.key.batch_id)
                await self._pass_by(claim)
            self._loading.discard(claim)
        return bool(claims)

    async def _pass_by(self, claim: Claim) -> None:
        """Gives a chunk that this server cannot run back for good."""
        self._passed_by.add(claim.key)
        self._loading.discard(claim)
        await self._release([claim])

    def _end_to_take(self, figures: BoardFigures) -> End:
        held = [one.work for one in self._held.values()]
        compute_s, memory_s = sum(work.compute_s for work in held), sum(work.memory_s for work in held)
        return end_to_take(compute_s, memory_s, figures.mean_density)

    async def _take_up(self, claim: Claim) -> None:
        """Hands a leased chunk's lines to the engine.

        Raises:
            OSError, StoreUnavailableError: not possible now.
            UnableError: not possible on this server.
        """
        store, batch_id = self._p.store, claim.key.batch_id
        record = await store.read(batch_rows.require_batch, batch_id)
        lines = await store.read(batch_rows.pending_lines, batch_id, claim.key.chunk_no)
        if record.outcome is not None or self._leaves() or self._is_validating(batch_id):
            self._loading.discard(claim)
            await self._release([claim])
            return
        if not lines:
            self._background.spawn(self._complete(claim))
            return
        try:
            file = await self._p.verify_input(record)
        except NotFoundError:
            logger.error("batch %s: its input file has been dropped", batch_id)
            await store.write(_give_up, claim)
            self._on_batch_done(batch_id)
            return
        job, work = await self._load(record, file, lines, claim)
        if claim not in self._loading:
            return  # Lost in the meantime.
        self._held[job.id] = _Held(claim, job, work)
        self._runner.add_job(job)
        if self._leaves():
            await self.give_back()

    async def _load(
        self, record: BatchRecord, file: FileRecord, lines: list[PendingLine], claim: Claim
    ) -> tuple[Job, Work]:
        plan = await self._plans.get(record, file)
        return await asyncio.to_thread(self._read_job, record, file, plan, lines, claim)

    def _read_job(
        self, record: BatchRecord, file: FileRecord, sealed: SealedPlan, lines: list[PendingLine], claim: Claim
    ) -> tuple[Job, Work]:
        stem = self._p.stem(record.id)
        plan, version = sealed
        tokens = TokenFile(stem)
        if lacking := lacks(self._p.compiler.served, lines, plan, tokens):
            raise UnableError(lacking)
        work = work_of(lines, plan, tokens, device_of(self._p.engine))
        files = JobFiles(file, self._p.files.open_here, stem, version)
        return Job(record, plan, lines, files, self._p.compiler, LeasedLines(claim)), work

    def _describe(self, job: Job) -> tuple[Path, float]:
        return self._p.describe(job.batch_id, job.expires_at)

    # ---- ending ----

    def _on_done(self, job_id: str) -> None:
        held = self._held.pop(job_id, None)
        if held is not None:
            self._background.spawn(self._complete(held.claim))
        self._wake.set()

    async def _complete(self, claim: Claim) -> None:
        batch_id = claim.key.batch_id
        if await self._disk.retry(batch_id, lambda: self._p.store.write_beside(_complete, claim)):
            self._on_batch_done(batch_id)

    def _on_lost(self, job_id: str) -> None:
        held = self._held.pop(job_id, None)
        if held is None:
            return
        self.num_lost += not held.is_over
        logger.warning("batch %s: a lease is lost: another server will run the lines, or the batch has ended", job_id)
        self._plans.forget(held.claim.key.batch_id)
        self._background.spawn(self._runner.close_job(job_id))

    async def close_batch(self, batch_id: str) -> None:
        """Removes a batch from the engine; returns when all its results that arrived here are stored."""
        mine = [held for held in self._held.values() if held.claim.key.batch_id == batch_id]
        await self._close(mine)

    def _on_tokens_lost(self, job_id: str) -> None:
        held = self._held.get(job_id)
        if held is not None and not held.is_over:
            self._background.spawn(self.give_back([held]))

    async def give_back(self, held: list[_Held] | None = None) -> None:
        """Gives back these chunks, or all, without what the engine has done."""
        held = list(self._held.values()) if held is None else held
        await self._close(held)
        await self._release([one.claim for one in held])

    async def _close(self, held: list[_Held]) -> None:
        for one in held:
            one.is_over = True
        await asyncio.gather(*(self._runner.close_job(one.job.id) for one in held))
        for one in held:
            self._held.pop(one.job.id, None)

    async def _release(self, claims: list[Claim]) -> None:
        if not claims:
            return
        try:
            await self._p.store.write_beside(chunk_rows.release_claims, claims)
        except StoreUnavailableError as error:
            logger.error("%d chunks are free only after their leases expire: %s", len(claims), error)

    # ---- leases ----

    async def _renew_on(self) -> None:
        period_s = self._lease_s / RENEWALS_A_LEASE
        while not self._is_stopping:
            try:
                await self._renew()
            except (OSError, StoreUnavailableError) as error:
                logger.error("leases are not renewed: %s", error)
            self._silent_s = 0.0 if self._p.engine.is_ready else self._silent_s + period_s
            if self._held and (self._p.engine.offline_paused or self._silent_s >= self._lease_s):
                self._background.spawn(self.give_back())
            await self._disk.sleep(period_s)

    async def _renew(self) -> None:
        claims = {job_id: held.claim for job_id, held in self._held.items() if not held.is_over}
        loading = self._loading.difference(claims.values())
        if not claims and not loading:
            return
        kept = await self._p.store.write_beside(_renew, [*claims.values(), *loading], self.claimant.lease_ms)
        for job_id, claim in claims.items():
            if claim not in kept:
                self._on_lost(job_id)
        for claim in loading & self._loading - kept:
            self.num_lost += 1
            self._loading.discard(claim)
            logger.warning("batch %s: a lease is lost before its lines were loaded", claim.key.batch_id)


def _claim(
    conn: sa.Connection, end: End, turns: Mapping[str, int], claimant: Claimant, besides: Besides
) -> list[Claim]:
    now_ms = database_now_ms(conn)
    claimed = (
        chunk_rows.claim_chunks(conn, end, now_ms, limit, claimant, besides, owner) for owner, limit in turns.items()
    )
    return [claim for claims in claimed for claim in claims]


def _renew(conn: sa.Connection, claims: list[Claim], lease_ms: int) -> set[Claim]:
    return chunk_rows.renew_claims(conn, claims, database_now_ms(conn), lease_ms)


def _complete(conn: sa.Connection, claim: Claim) -> bool:
    """Returns whether the batch has no chunk left."""
    chunk_rows.complete_chunk(conn, claim)
    return chunk_rows.num_chunks(conn, claim.key.batch_id) == 0


def _give_up(conn: sa.Connection, claim: Claim) -> None:
    """Fails the remaining lines of a batch that no server can run, if this server holds the chunk's lease."""
    record = batch_rows.require_batch(conn, claim.key.batch_id)
    if record.outcome is None and LeasedLines(claim).holds(conn):
        batch_rows.close_lines(conn, record.id, LineState.FAILED, finalize.LOST_ERROR)
