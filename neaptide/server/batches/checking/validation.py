"""Validation of a batch: checks its file line by line and stores the verdict."""

import asyncio
import errno
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from neaptide.server.batches.checking.job_files import PlanLostError, remove_plan, seal_plan
from neaptide.server.batches.checking.validate import Check, CheckerDiedError, CheckReport, Keep, LineFault
from neaptide.server.batches.served import Abilities
from neaptide.server.batches.sharing import BatchLease, LeaseLostError
from neaptide.server.batches.storing import batch_rows, server_rows
from neaptide.server.batches.storing.disk_patience import PatientDisk
from neaptide.server.batches.storing.faults import FileAwayError
from neaptide.server.batches.storing.models import BatchRecord, FileRecord, NewLine
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.batches.wiring import BatchContext
from neaptide.server.http.auth import share_of
from neaptide.server.http.errors import NotFoundError, UnavailableError

logger = logging.getLogger(__name__)

MAX_DEATHS = 2
"""Number of crashes of the checking process, or overruns of its memory, after which the batch fails: its file may be
the cause. Processes that were killed do not count."""
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0


class Validation:
    """Checks files, one of each key at a time. Retries when the disk refuses or the checking process is killed."""

    def __init__(self, context: BatchContext, disk: PatientDisk) -> None:
        self._context = context
        self._disk = disk
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lock of each owner. Files of different keys are checked in turns."""

    async def run(self, record: BatchRecord, stop: asyncio.Event, hold: BatchLease) -> bool:
        """Validates a batch; returns whether it is durably in_progress.

        False if it has failed, is left to a server of another model, or ``stop`` came first.

        Raises:
            ServerStoppingError: the server stops before there is a verdict.
            LeaseLostError: another server has leased the batch.
        """
        while True:
            report = await self._disk.retry(record.id, lambda: self._check_unless(record, stop, hold))
            if report is None:
                return False
            try:
                return await self._write_verdict(record, report, stop, hold)
            except PlanLostError as error:
                logger.warning("batch %s: its file is checked again: %s", record.id, error)

    async def _write_verdict(
        self, record: BatchRecord, report: CheckReport, stop: asyncio.Event, hold: BatchLease
    ) -> bool:
        if report.is_foreign:
            await self._disk.retry(record.id, lambda: self._leave(record, report, hold))
            return False
        if not report.errors:
            return await self._disk.retry(record.id, lambda: self._write_begun(record, report, stop, hold))
        await self._disk.retry(record.id, lambda: self._write_failed(record, report, stop, hold))
        return False

    async def _check_unless(self, record: BatchRecord, stop: asyncio.Event, hold: BatchLease) -> CheckReport | None:
        """The file's report, or None if ``stop`` came first."""
        checking, stopped = asyncio.create_task(self._check(record, hold)), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({checking, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if checking.done():
                return checking.result()
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
            return None
        finally:
            stopped.cancel()

    async def _check(self, record: BatchRecord, hold: BatchLease) -> CheckReport:
        insert_lines, discard_lines = hold.guarded(batch_rows.insert_lines), hold.guarded(batch_rows.discard_lines)

        async def begin() -> None:
            await self._context.store.write(discard_lines, record.id)

        async def keep(lines: Sequence[NewLine]) -> None:
            await self._context.store.write(insert_lines, record.id, lines)

        try:
            file = await self._context.verify_input(record)
            report = await self._check_file(record, file, begin, keep)
            # Confirms that the bytes read are the stored ones; they may have changed since they were compared.
            await self._context.files.verify(file)
        except NotFoundError:
            fault = LineFault("invalid_request", "Cannot find the input file.", "file_id")
            return CheckReport(errors=[fault.entry(None)])
        return report

    async def make_plan_again(self, record: BatchRecord, file: FileRecord) -> list[NewLine]:
        """Builds a lost plan again from its input; returns its lines.

        Raises:
            OSError: not possible now.
        """
        found: list[NewLine] = []

        async def begin() -> None:
            found.clear()
            # The old file is not overwritten, because the engine may have mapped it.
            await asyncio.to_thread(remove_plan, self._context.stem(record.id))

        async def keep(lines: Sequence[NewLine]) -> None:
            found.extend(lines)

        report = await self._check_file(record, file, begin, keep)
        await self._context.files.verify(file)
        if report.is_foreign:
            raise FileAwayError(errno.EIO, f"its plan is lost, and its lines name the model {report.model!r}")
        if report.errors:
            message = report.errors[0]["message"]
            raise FileAwayError(errno.EIO, f"its plan is lost, and its file does not pass the check now: {message}")
        await asyncio.to_thread(seal_plan, self._context.stem(record.id), report.plan_digest)
        return found

    async def _others(self) -> tuple[Abilities, ...] | None:
        """Abilities of this model's servers that can do something this one cannot; None for a single server."""
        if self._context.store.blobs is None:
            return None
        served = self._context.compiler.served
        known = await self._context.store.read(server_rows.known_abilities, served.fingerprint)
        return tuple(one for one in known if not served.abilities.covers(one))

    async def _check_file(
        self, record: BatchRecord, file: FileRecord, begin: Callable[[], Awaitable[None]], keep: Keep
    ) -> CheckReport:
        """Retries a check; ``begin`` is called before each try."""
        path, stem, others = self._context.files.path(file.id), self._context.stem(record.id), await self._others()
        check = Check(
            record.endpoint, str(path), str(stem), self._context.settings.limits, share_of(record.owner), others
        )
        num_deaths, delay_s = 0, FIRST_DELAY_S
        while num_deaths < MAX_DEATHS:
            try:
                async with self._one_at_a_time[record.owner]:
                    await begin()
                    return await self._context.checker.check(check, keep)
            except (OSError, StoreUnavailableError, LeaseLostError):
                raise
            except UnavailableError as error:
                logger.warning("batch %s: its file cannot be checked now: %s", record.id, error)
            except CheckerDiedError as error:
                logger.error("batch %s: %s", record.id, error)
                if error.by_itself:
                    num_deaths += 1
                    continue
            except Exception:
                logger.exception("batch %s: validation failed", record.id)
                break
            # Other files are checked in the meantime: a machine that is short of memory kills the larger process first.
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        return CheckReport(errors=[LineFault("internal_error", "The file could not be checked.").entry(None)])

    async def _leave(self, record: BatchRecord, report: CheckReport, hold: BatchLease) -> None:
        logger.info(
            "batch %s: its lines name the model %r; it is left to a server that has it", record.id, report.model
        )
        await self._context.store.write(hold.guarded(server_rows.leave_to_model), record.id, report.model)

    # Both look at ``stop`` first: a failing disk must not keep a cancelled batch and its plan's space.

    async def _write_failed(
        self, record: BatchRecord, report: CheckReport, stop: asyncio.Event, hold: BatchLease
    ) -> bool:
        if stop.is_set():
            return False
        logger.info("batch %s: failed validation with %d errors", record.id, len(report.errors))
        fail_batch = hold.guarded(batch_rows.fail_batch)
        return await self._context.store.write(fail_batch, record.id, report.errors, self._context.now(record))

    async def _write_begun(
        self, record: BatchRecord, report: CheckReport, stop: asyncio.Event, hold: BatchLease
    ) -> bool:
        if stop.is_set():
            return False
        await asyncio.to_thread(seal_plan, self._context.stem(record.id), report.plan_digest)
        return await hold.begin(record, report.model, self._context.now(record))
