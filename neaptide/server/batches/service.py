"""Files and batches without HTTP, for the routes and for ``launch``."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import sqlalchemy as sa

from neaptide.durations import window_seconds
from neaptide.server.batches.checking.create import parse_create
from neaptide.server.batches.checking.validate import Checker
from neaptide.server.batches.lines import LineCompiler
from neaptide.server.batches.mending.report import report
from neaptide.server.batches.objects import batch_object
from neaptide.server.batches.planning.planning import MakesPlans
from neaptide.server.batches.receipts.book import CostBook
from neaptide.server.batches.receipts.receipt import Seal, receipt_of
from neaptide.server.batches.receipts.sums import BatchSums
from neaptide.server.batches.running.deadline_status import BatchStatuses
from neaptide.server.batches.running.state_machine import StateMachine
from neaptide.server.batches.sharing import BatchStateMachine, JobLeft
from neaptide.server.batches.storing import batch_rows, cost_rows, file_rows, server_rows
from neaptide.server.batches.storing.batch_rows import WrongPurposeError
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.faults import StorageHealth
from neaptide.server.batches.storing.file_rows import IdempotencyConflictError
from neaptide.server.batches.storing.files import FileStore
from neaptide.server.batches.storing.leftovers import tidy
from neaptide.server.batches.storing.models import (
    BatchRecord,
    BatchStatus,
    IdempotencyKey,
    NewBatch,
    new_batch_id,
    new_file_id,
)
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from neaptide.server.batches.wiring import BatchContext, BatchSettings, Clocks
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.events import BatchOutlooks
from neaptide.server.http.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedParameterError,
    server_stops,
)
from neaptide.server.openai.stored_replies import Batch, BatchReceipt, UnsignedReceipt

logger = logging.getLogger(__name__)

Promise = Callable[[str, int], Awaitable[int]]
"""Unix time by which a batch on this file is promised, which is no later than the given one. Raises ApiError."""


class BatchService:
    """The batch service of one server and data directory.

    ``owner`` in every call is the caller's identity ("" without API keys). Callers see only their own objects.
    """

    def __init__(
        self,
        settings: BatchSettings,
        engine: EngineClient,
        compiler: LineCompiler,
        checker: Checker,
        *,
        clocks: Clocks | None = None,
        planner: MakesPlans | None = None,
    ) -> None:
        clocks = clocks or Clocks()
        self.settings = settings
        self.store = Store(settings.data_dir, settings.sharing)
        self.files = FileStore(self.store, clocks.wall, settings.max_file_bytes, settings.file_life_s)
        self.outlooks = BatchStatuses()
        engine.subscribe(BatchOutlooks, lambda heard: self.outlooks.hear(heard.outlooks))
        self._clocks = clocks
        self.compiler = compiler
        self._is_suspended = False
        self._watching: asyncio.Task[None] | None = None
        is_sole = settings.sharing is None
        self.costs = CostBook(engine, self.store, clocks.wall, keeps_batches=is_sole)
        """Costs of keys and batches."""
        self._seal: Seal | None = None
        """Seal of receipts; None if servers share the batches, and before the start."""
        own_costs = self.costs if is_sole else None
        context = BatchContext(self.store, self.files, engine, compiler, checker, settings, clocks, planner, own_costs)
        shared = None if settings.sharing is None else settings.sharing.machine(context)
        self._machine: BatchStateMachine = shared or StateMachine(context)
        self.leases = self._machine.leases
        """Leases of this server, where several share the batches."""

    async def start(self) -> None:
        """Opens the data directory and resumes unfinished batches.

        Raises:
            StoreError: the directory is in use, damaged or not writable; the message is for the operator.
        """
        await asyncio.to_thread(self.store.open)
        try:
            await asyncio.to_thread(tidy, self.store, self._clocks.wall())
            await asyncio.to_thread(report, self.store, self._clocks.wall())
            if self.settings.sharing is None:
                self._seal = await asyncio.to_thread(Seal.of_directory, self.settings.data_dir)
            await self._machine.start()
        except OSError as error:
            self.store.close()
            raise StoreError(f"cannot use the data directory {self.store.data_dir}: {error.strerror}") from error
        except StoreUnavailableError as error:
            self.store.close()
            raise StoreError(f"cannot use the data directory {self.store.data_dir}: {error}") from error
        except BaseException:
            self.store.close()
            raise
        self.costs.start()
        self._watching = asyncio.create_task(self._watch_storage(), name="storage watch")

    async def stop(self) -> None:
        """Makes arrived results durable and releases the data directory; batches continue at the next start."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._machine.stop()
        await self.costs.stop()
        await asyncio.to_thread(self.store.close)

    def suspend(self) -> None:
        """Stops batch work on the engine and refuses new files and batches, for a server that is about to end."""
        self._is_suspended = True
        self._machine.suspend()

    def check_open(self) -> None:
        """Raises UnavailableError if new files and batches are refused because the server is about to end."""
        if self._is_suspended:
            raise server_stops()

    @property
    def storage_failing(self) -> bool:
        """Whether files or the database cannot be read or written now. Batches wait for them."""
        return self.store.failing or self.health.is_failing or self._machine.waits_for_disk

    @property
    def health(self) -> StorageHealth:
        """Current faults of the file storage."""
        return self.files.health

    async def _watch_storage(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_s)
            try:
                self.health.note_missing(await asyncio.to_thread(self.store.missing))
                await self.files.look_again()
                if self.store.failing:
                    await self.store.write(_nothing)
            except StoreUnavailableError:
                continue
            except Exception:
                logger.exception("checking the storage failed; it is retried later")

    # ---- batches ----

    async def create_batch(
        self,
        owner: str,
        body: Mapping[str, Any],
        *,
        salt: bytes = b"",
        idempotency_key: str | None = None,
        promise: Promise | None = None,
    ) -> BatchRecord:
        """A durable new batch, or the one that the same key created before. ``salt`` is the owner's cache salt.

        ``promise`` quotes a batch that is to be done by a given time.

        Raises:
            InvalidRequestError: the body is invalid, or the file is not a batch file.
            ConflictError: the idempotency key was used for another body.
            UnavailableError: the server is about to end.
        """
        self.check_open()
        asked = parse_create(body, self.settings.completion_windows)
        key = None
        if idempotency_key is not None:
            text = json.dumps(body, sort_keys=True, default=str)
            key = IdempotencyKey(owner, "batches", idempotency_key, hashlib.sha256(text.encode()).hexdigest())
        due_at = None
        accept_by = asked.accept_by
        if accept_by is not None and key is not None and await self.store.read(file_rows.is_claimed, key):
            accept_by = None  # The repeat gets the batch that the first one made.
        if accept_by is not None:
            if promise is None:
                raise UnsupportedParameterError("'accept_by' is not offered here.", param="accept_by")
            due_at = await promise(asked.input_file_id, accept_by)
        now = int(self._clocks.wall())
        new = NewBatch(
            id=new_batch_id(),
            owner=owner,
            salt=salt.hex(),
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            output_expires_after_s=asked.output_expires_after_s,
            metadata=asked.metadata,
            created_at=now,
            expires_at=now + window_seconds(asked.completion_window),
            due_at=due_at,
        )
        planned = (new_file_id(), new_file_id())
        try:
            # Shielded: once the record may be durable, the batch must also begin, even if the client has disconnected.
            return await asyncio.shield(self._create(new, planned, key))
        except WrongPurposeError:
            raise InvalidRequestError(
                "The input file was not uploaded with purpose 'batch'.", param="input_file_id", code="invalid_value"
            ) from None
        except IdempotencyConflictError:
            raise ConflictError(
                "The Idempotency-Key was used for a different batch.", code="idempotency_key_reused"
            ) from None

    async def _create(self, new: NewBatch, planned: tuple[str, str], key: IdempotencyKey | None) -> BatchRecord:
        record = await self.store.write(batch_rows.create_batch, new, planned, key, self.compiler.served)
        if record.id == new.id:
            self._machine.begin(record)
        return record

    async def get_batch(self, batch_id: str, owner: str) -> BatchRecord:
        """The owner's batch. Raises NotFoundError for unknown and other owners' batches alike."""
        record = await self.store.read(batch_rows.get_batch, batch_id, owner)
        if record is None:
            raise NotFoundError("No batch found with this id.", param="id")
        return record

    async def list_batches(self, owner: str, limit: int, after: str | None) -> tuple[list[BatchRecord], bool]:
        """A page of batches, newest first, and whether more follow."""
        found = await self.store.read(batch_rows.list_batches, owner, limit + 1, after)
        if found is None:
            raise InvalidRequestError("No batch has the id given in 'after'.", param="after", code="invalid_value")
        return found[:limit], len(found) > limit

    async def shown(self, *records: BatchRecord) -> list[Batch]:
        """API objects of the batches."""
        live = [record.id for record in records if not record.is_terminal]
        waiting = await self.store.read(server_rows.waiting, live) if live else []
        why = {one.batch_id: one.why for one in waiting}
        return [batch_object(record, self.outlooks, why.get(record.id)) for record in records]

    async def cancel_batch(self, batch_id: str, owner: str) -> BatchRecord:
        """Decides that a batch ends as cancelled; durable on return.

        Raises:
            NotFoundError: no such batch.
            ConflictError: it has ended otherwise, or its files are being written.
        """
        record = await self.get_batch(batch_id, owner)
        await asyncio.shield(self._cancel(record))
        record = await self.get_batch(batch_id, owner)
        if record.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            status = record.status if record.outcome is not BatchStatus.EXPIRED else record.outcome
            raise ConflictError(f"Cannot cancel a batch with status '{status}'.")
        return record

    async def _cancel(self, record: BatchRecord) -> None:
        now = max(int(self._clocks.wall()), record.created_at, record.in_progress_at or 0)
        if await self.store.write(batch_rows.request_cancel, record.id, now):
            self._machine.end(record.id)

    @property
    def seal(self) -> Seal:
        """Seal of receipts. Raises ConflictError if servers share the batches."""
        if self._seal is None:
            raise ConflictError(
                "Receipts are for a server that shares its batches with no other.", code="receipts_unavailable"
            )
        return self._seal

    async def receipt(self, batch_id: str, owner: str) -> BatchReceipt:
        """Receipt of an ended batch.

        Raises:
            NotFoundError: no such batch, or it ended before there were receipts.
            ConflictError: it has not ended, or servers share the batches.
        """
        record = await self.get_batch(batch_id, owner)
        seal = self.seal
        if not record.is_terminal:
            raise ConflictError("A batch has its receipt once it has ended.", code="batch_not_ended")
        stored = await self.store.read(cost_rows.stored_receipt, batch_id)
        if stored is not None:
            receipt: UnsignedReceipt = json.loads(stored)
        elif record.status is BatchStatus.FAILED:
            receipt = receipt_of(record, BatchSums())  # None of its lines has run.
        else:
            raise NotFoundError(
                "The batch ended before this server kept receipts.", param="id", code="receipt_not_found"
            )
        return {**receipt, "hash": seal.hash_of(receipt)}

    async def backlog(self) -> list[JobLeft]:
        """Remaining work of all servers of this one's model. Raises StoreUnavailableError."""
        return await self._machine.backlog()

    @property
    def now_s(self) -> float:
        """Current unix time."""
        return self._clocks.wall()

    async def expire_overdue(self) -> None:
        """Runs the periodic check now, for tests and operators."""
        await self._machine.expire_overdue()


def _nothing(_: sa.Connection) -> None:
    """A write that only checks whether the database accepts writes."""
