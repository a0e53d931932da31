"""Periodic work: ends overdue batches and removes what has expired."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from neaptide.server.batches.storing import batch_rows, server_rows
from neaptide.server.batches.storing.disk_patience import PatientDisk
from neaptide.server.batches.storing.housekeeping import Housekeeping
from neaptide.server.batches.storing.server_rows import Waiting
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.batches.wiring import BatchContext

logger = logging.getLogger(__name__)

SWEEP_PERIOD_S = 60.0


def say_what_waits(batches: Iterable[Waiting]) -> None:
    """Logs one line for each reason at the start: the operator may have meant another model."""
    for why, count in Counter(one.why for one in batches).items():
        logger.warning("batches that wait for another server: %d. %s", count, why)


async def _nothing_more() -> None: ...


class Expiry:
    """Runs the periodic work.

    ``end`` is called with the id of every expired batch. ``sweep`` is called periodically after the store's own
    housekeeping. ``look_again`` is called after a write of unknown outcome.
    """

    def __init__(
        self,
        context: BatchContext,
        disk: PatientDisk,
        end: Callable[[str], None],
        sweep: Callable[[], Awaitable[None]] = _nothing_more,
        look_again: Callable[[], Awaitable[None]] = _nothing_more,
    ) -> None:
        self._context = context
        self._disk = disk
        self._end = end
        self._sweep = sweep
        self._look_again = look_again
        self._num_unknown = 0
        """Number of writes of unknown outcome that have been resolved."""
        self._has_to_wait = False
        self._housekeeping = Housekeeping(context.store, context.files, context.clocks.wall)

    async def run(self, is_stopping: Callable[[], bool]) -> None:
        """Runs until the server stops."""
        ticks_per_sweep = max(1, round(SWEEP_PERIOD_S / self._context.settings.tick_s))
        ticks = 0
        while not is_stopping():
            try:
                await self.expire_overdue()
                await self._settle_unknown()
                if ticks % ticks_per_sweep == 0:
                    await self._housekeeping.run()
                    await self._sweep()
                self._has_to_wait = False
            except (OSError, StoreUnavailableError) as error:
                if not self._has_to_wait:
                    logger.error("housekeeping failed and will be retried: %s", error)
                self._has_to_wait = True
            ticks += 1
            await self._disk.sleep(self._context.settings.tick_s)

    async def _settle_unknown(self) -> None:
        num_unknown = self._context.store.num_unknown
        if num_unknown != self._num_unknown:
            await self._look_again()
            await self._context.files.settle()
            self._num_unknown = num_unknown

    async def expire_overdue(self) -> None:
        """Ends batches whose completion window is over.

        Raises:
            StoreUnavailableError: a temporary failure.
        """
        now = int(self._context.clocks.wall())
        if not await self._context.store.read(batch_rows.overdue, now):
            return
        for batch_id in await self._context.store.write(server_rows.fail_unserved, now):
            logger.info("batch %s: no server has served its model in its completion window", batch_id)
        for batch_id in await self._context.store.write(batch_rows.expire_overdue, now):
            logger.info("batch %s: its completion window is over", batch_id)
            self._end(batch_id)
