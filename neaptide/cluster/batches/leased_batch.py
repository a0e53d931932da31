"""Moves a batch on under a lease, while other servers do the same with other batches."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from neaptide.cluster.batches import chunk_rows
from neaptide.cluster.batches.cutting import SOME_DEVICE, cut
from neaptide.cluster.batches.lease_rows import HeldBatchLease, guarded
from neaptide.cluster.batches.plans import put_plan, remove_plan_blobs
from neaptide.cluster.lease_order import LeaseChunk
from neaptide.cluster.storage.blobs import Blobs, BlobsUnavailableError, batch_key
from neaptide.engine.offline.density import DensityModel
from neaptide.server.batches.checking.job_files import plan_faults, read_plan
from neaptide.server.batches.sharing import ResultFiles
from neaptide.server.batches.storing import batch_rows, server_rows
from neaptide.server.batches.storing.models import BatchRecord, FileRecord
from neaptide.server.batches.storing.tables import batches
from neaptide.server.batches.wiring import BatchContext
from neaptide.server.engine_client.client import EngineClient, EngineUnavailableError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def device_of(engine: EngineClient) -> DensityModel:
    """Times of the engine's device; ``SOME_DEVICE`` until the engine has told them."""
    try:
        info = engine.info
    except EngineUnavailableError:
        return SOME_DEVICE
    if info.token_s <= 0 or info.kv_token_s <= 0:
        return SOME_DEVICE
    return DensityModel.in_seconds(info.token_s, info.kv_token_s, info.pair_s)


def begin_shared(
    conn: sa.Connection,
    record: BatchRecord,
    model: str,
    fingerprint: str,
    now: int,
    plan_blob: str,
    chunks: dict[LeaseChunk, list[int]],
) -> bool:
    """Does as ``batch_rows.begin_batch``, names the plan, and offers the lines to all servers."""
    if not batch_rows.begin_batch(conn, record.id, model, fingerprint, now):
        return False
    unnamed = batches.update().where(batches.c.id == record.id, batches.c.plan_blob.is_(None))
    if conn.execute(unnamed.values(plan_blob=plan_blob)).rowcount:
        chunk_rows.add_chunks(conn, chunks)
    # Otherwise a commit whose answer was lost has begun it, with the plan of that time.
    return True


class LeasedHold:
    """Implements ``Hold``. Every write raises LeaseLostError once another server has leased the batch."""

    def __init__(self, context: BatchContext, blobs: Blobs, lease: HeldBatchLease) -> None:
        self._context = context
        self._blobs = blobs
        self._lease = lease

    def guarded(
        self, operation: Callable[Concatenate[sa.Connection, P], T]
    ) -> Callable[Concatenate[sa.Connection, P], T]:
        return guarded(self._lease, operation)

    async def begin(self, record: BatchRecord, model: str, now: int) -> bool:
        fingerprint = self._context.compiler.served.fingerprint
        store, stem = self._context.store, self._context.stem(record.id)
        lines = await store.read(batch_rows.pending_lines, record.id)
        key = batch_key(record.id, self._lease.epoch)
        with plan_faults(stem):
            plan = await asyncio.to_thread(read_plan, stem)
            contexts = [one.max_model_len for one in await store.read(server_rows.known_abilities, fingerprint)]
            chunks = await asyncio.to_thread(cut, record, lines, plan, stem, device_of(self._context.engine), contexts)
            await self._blobs.in_thread(put_plan, self._blobs, stem, key)
        return await store.write(self.guarded(begin_shared), record, model, fingerprint, now, key, chunks)

    async def publish(self, record: BatchRecord, files: ResultFiles) -> ResultFiles:
        output, error = files
        return await self._put(record, output), await self._put(record, error)

    async def _put(self, record: BatchRecord, file: FileRecord | None) -> FileRecord | None:
        if file is None:
            return None
        key = f"{batch_key(record.id, self._lease.epoch)}.jsonl"
        await self._blobs.in_thread(self._blobs.put, self._context.files.path(file.id), key)
        return replace(file, blob=key)

    async def tidy(self, record: BatchRecord) -> None:
        if record.plan_blob is None:
            return
        try:
            await self._blobs.in_thread(remove_plan_blobs, self._blobs, record.plan_blob)
        except BlobsUnavailableError as error:
            # ``neaptide data prune`` finds such leftovers.
            logger.warning("batch %s: its plan is left on the shared storage: %s", record.id, error)
