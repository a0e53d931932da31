"""The state machine for several servers that share their batches: any server may take any step of any batch.

    lines            chunks, leased by a server whose engine has room (``leased_chunks.py``)
    everything else  a lease of the batch: to check its file, to write its results

The arrows are those of ``running/state_machine.py``. Each is a compare-and-set in the database, and so is each lease.
When a server dies, its leases end, and other servers take its work over.
"""

import asyncio
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass

from neaptide.cluster.batches import chunk_rows, lease_rows
from neaptide.cluster.batches.lease_rows import HeldBatchLease
from neaptide.cluster.batches.leased_batch import LeasedHold
from neaptide.cluster.batches.leased_chunks import RENEWALS_A_LEASE, LeasedChunks
from neaptide.cluster.storage.blobs import Blobs
from neaptide.server.batches.checking.validation import Validation
from neaptide.server.batches.running import finalize
from neaptide.server.batches.running.background import Background
from neaptide.server.batches.running.ending import Ending
from neaptide.server.batches.running.expiry import Expiry, say_what_waits
from neaptide.server.batches.sharing import JobLeft, LeaseFigures, LeaseLostError
from neaptide.server.batches.storing import batch_rows, server_rows
from neaptide.server.batches.storing.disk_patience import PatientDisk, ServerStoppingError
from neaptide.server.batches.storing.leftovers import judge_jobs
from neaptide.server.batches.storing.models import BatchRecord, BatchStatus
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.batches.wiring import BatchContext

logger = logging.getLogger(__name__)

MAX_CARES = 4
"""Batches that this server checks or ends at once. It checks files one at a time anyway."""


@dataclass(slots=True)
class _Care:
    lease: HeldBatchLease
    stop: asyncio.Event
    """Set when the batch needs no validation any more, or another server has taken it over."""
    is_validating: bool = False


class SharedStateMachine:
    """Implements ``BatchStateMachine``. Event loop only."""

    def __init__(self, context: BatchContext, blobs: Blobs, lease_s: float) -> None:
        self._context = context
        self._blobs = blobs
        self._lease_s, self._lease_ms = lease_s, int(lease_s * 1000)
        self._disk = PatientDisk()
        self._stopping = threading.Event()
        self._validation = Validation(context, self._disk)
        self._ending = Ending(context, self._stopping)
        self._expiry = Expiry(context, self._disk, self.end, self._sweep)
        self.chunks = LeasedChunks(
            context, blobs, lease_s, self._disk, self._validation, lambda _: self._wake.set(), self._is_validating
        )
        self._cares: dict[str, _Care] = {}
        self._background = Background("a batch is left to the end of its lease")
        self._wake = asyncio.Event()

    # ---- start and stop ----

    async def start(self) -> None:
        """As in ``BatchStateMachine``."""
        await self._enrol()
        say_what_waits(await self._context.store.read(server_rows.waiting))
        self.chunks.start()
        for work in (self._care_on(), self._renew_on(), self._expiry.run(self._stopping.is_set)):
            self._background.spawn(work)

    async def stop(self) -> None:
        """Keeps computed results and leaves the rest to other servers, or to the next start."""
        self._stopping.set()
        self._background.close()
        self._disk.stop()
        self._wake.set()
        for care in self._cares.values():
            care.stop.set()
        await self.chunks.stop()
        await self._background.drain()
        await self._context.checker.close()
        with suppress(StoreUnavailableError):
            await self._context.store.write_beside(server_rows.leave, self.chunks.server.name)

    @property
    def leases(self) -> LeaseFigures:
        """As in ``BatchStateMachine``."""
        return self.chunks

    async def backlog(self) -> list[JobLeft]:
        return await self._context.store.read(chunk_rows.backlog, self._context.compiler.served.fingerprint)

    @property
    def waits_for_disk(self) -> bool:
        return self._disk.is_refusing

    # ---- from outside ----

    def begin(self, record: BatchRecord) -> None:
        self._wake.set()

    def end(self, batch_id: str) -> None:
        care = self._cares.get(batch_id)
        if care is not None:
            care.stop.set()
        self._background.spawn(self._close(batch_id))

    async def _close(self, batch_id: str) -> None:
        # Results that have arrived here still count; those of other servers do until the lines are closed.
        await self.chunks.close_batch(batch_id)
        self._wake.set()

    def suspend(self) -> None:
        """As in ``BatchStateMachine``."""
        self.chunks.suspend()

    # ---- batches ----

    async def _care_on(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                while len(self._cares) < MAX_CARES and (lease := await self._lease_batch()) is not None:
                    care = self._cares[lease.batch_id] = _Care(lease, asyncio.Event())
                    self._background.spawn(self._care(care))
            except (OSError, StoreUnavailableError) as error:
                logger.error("batches have to wait: %s", error)
            try:
                async with asyncio.timeout(self._context.settings.tick_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _lease_batch(self) -> HeldBatchLease | None:
        served = self._context.compiler.served
        if self._stopping.is_set() or not await self._context.store.read(lease_rows.needs_care, served):
            return None
        excluded = list(self._cares)
        return await self._context.store.write_beside(
            lease_rows.lease_batch, self._lease_ms, excluded=excluded, served=served
        )

    async def _care(self, care: _Care) -> None:
        """Moves a batch on as far as it goes without its lines. After a failure, some server tries again when the lease
        ends."""
        lease = care.lease
        try:
            await self._move_on(care)
        except LeaseLostError:
            logger.warning("batch %s: another server has leased it", lease.batch_id)
        except (ServerStoppingError, finalize.FinalizeStoppedError):
            await self._release(lease)
        else:
            await self._release(lease)
        finally:
            if self._cares.get(lease.batch_id) is care:
                del self._cares[lease.batch_id]
            self._wake.set()

    def _is_validating(self, batch_id: str) -> bool:
        return batch_id in self._cares and self._cares[batch_id].is_validating

    async def _move_on(self, care: _Care) -> None:
        store, batch_id = self._context.store, care.lease.batch_id
        hold = LeasedHold(self._context, self._blobs, care.lease)
        record = await store.read(batch_rows.require_batch, batch_id)
        if record.status is BatchStatus.VALIDATING and record.outcome is None:
            care.is_validating = True
            if not await self._validation.run(record, care.stop, hold) and self._stopping.is_set():
                raise ServerStoppingError
            care.is_validating = False
            self.chunks.wake()
            record = await store.read(batch_rows.require_batch, batch_id)
        if record.outcome is None:
            begin_finalizing = hold.guarded(batch_rows.begin_finalizing)
            # Refused while lines are left to run; then the batch ends another time.
            if not await self._disk.retry(
                batch_id, lambda: store.write(begin_finalizing, batch_id, self._context.now(record))
            ):
                return
        await self._disk.retry(batch_id, lambda: self._ending.end(batch_id, hold))

    async def _release(self, lease: HeldBatchLease) -> None:
        try:
            await self._context.store.write_beside(lease_rows.release_batch, lease)
        except StoreUnavailableError as error:
            logger.error("batch %s is free only after its lease expires: %s", lease.batch_id, error)

    # ---- time ----

    async def _renew_on(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._enrol()
                await self._renew()
            except (OSError, StoreUnavailableError) as error:
                logger.error("leases are not renewed: %s", error)
            await self._disk.sleep(self._lease_s / RENEWALS_A_LEASE)

    async def _enrol(self) -> None:
        name, served = self.chunks.server.name, self._context.compiler.served
        await self._context.store.write_beside(server_rows.enrol, name, served, self._lease_ms)

    async def _renew(self) -> None:
        cares = {care.lease: care for care in self._cares.values()}
        if not cares:
            return
        kept = await self._context.store.write_beside(lease_rows.renew_batches, list(cares), self._lease_ms)
        for lease, care in cares.items():
            # The lease is lost, or another server has cancelled the batch.
            if kept.get(lease, True):
                care.stop.set()

    async def expire_overdue(self) -> None:
        await self._expiry.expire_overdue()

    async def _sweep(self) -> None:
        await asyncio.to_thread(self._drop_stale_plans)

    def _drop_stale_plans(self) -> None:
        """Removes copies of plans of batches that ended on other servers."""
        verdict = judge_jobs(self._context.store)
        for path in self._context.jobs_dir.iterdir():
            if verdict(path.name) is False:
                path.unlink(missing_ok=True)
