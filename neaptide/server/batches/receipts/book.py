"""Adds up what batches and keys cost, and stores the sums about once a second."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import NamedTuple, Protocol

from neaptide.durations import DAY_S
from neaptide.engine.messages import RecentSteps
from neaptide.server.batches.receipts.sums import BatchSums, sums_encoder, total
from neaptide.server.batches.storing import cost_rows
from neaptide.server.batches.storing.cost_rows import CostOf, KeyCost
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.http.auth import share_of

logger = logging.getLogger(__name__)

STORE_EVERY_S = 1.0
"""Time between two writes; what a kill may lose."""
SPLIT_EVERY_S = 10.0
"""Time after which the time of a running batch is split into its parts. What was not split yet, a kill loses."""
REPORT_S = 2.0
"""Device time is reported within this time."""


class TimeUses(Protocol):
    """Tells what a time went to (``why.device_time``)."""

    def parts(self, start_s: float, end_s: float, share: str) -> dict[str, float]:
        """Seconds between two moments (unix seconds) for the batches of a share; they add up to the time."""
        ...


class WatchedBatch(NamedTuple):
    """A batch in progress."""

    share: str
    sums: BatchSums
    split_until_s: float
    """Unix time until which its time is split."""


class CostBook:
    """Costs since this start of the server. Event loop only.

    Args:
        keeps_batches: whether this server alone runs the batches, so that it knows all their costs.
    """

    def __init__(self, engine: EngineClient, store: Store, wall: Callable[[], float], *, keeps_batches: bool) -> None:
        self.run = secrets.token_hex(8)
        """Name of this start of the server."""
        self.label_of: Callable[[str], str] = str
        """Name of the key that has a share."""
        self.uses: TimeUses | None = None
        """Uses of the batches' time; None: not known."""
        self.totals: dict[tuple[str, str], KeyCost] = {}
        """Costs by name of the key and kind of work."""
        self._store = store
        self._wall = wall
        self._keeps_batches = keeps_batches
        self._since_s = wall()
        self._batches: dict[str, WatchedBatch] = {}
        self._days: dict[CostOf, KeyCost] = {}
        self._changed_batches: set[str] = set()
        self._changed_days: set[CostOf] = set()
        self._day = -1
        self._task: asyncio.Task[None] | None = None
        engine.subscribe(RecentSteps, self._on_steps)

    # ---- what it hears ----

    def _on_steps(self, report: RecentSteps) -> None:
        day = int(self._wall() // DAY_S)
        for one in report.charges:
            key = self.label_of(one.share)
            of = CostOf(day, key, one.work)
            self._days[of] = _plus(self._days.get(of), one.computed_s, one.computed_tokens, one.decode_tokens)
            place = (key, one.work)
            self.totals[place] = _plus(self.totals.get(place), one.computed_s, one.computed_tokens, one.decode_tokens)
            self._changed_days.add(of)
            watched = self._batches.get(one.batch_id)
            if watched is not None:
                watched.sums.charge(one)
                self._changed_batches.add(one.batch_id)

    def watch(self, record: BatchRecord) -> None:
        """Begins, or goes on, to add up the costs of a batch in progress."""
        if self._keeps_batches and record.id not in self._batches and record.in_progress_at is not None:
            since_s = max(float(record.in_progress_at), self._since_s)
            self._batches[record.id] = WatchedBatch(share_of(record.owner), BatchSums(), since_s)

    def sums(self, batch_id: str, end_s: float) -> BatchSums:
        """Costs of a batch that ends at ``end_s``, since this start."""
        watched = self._batches.get(batch_id)
        if watched is None:
            return BatchSums()
        self._split(batch_id, watched, end_s)
        return total([watched.sums])

    def forget(self, batch_id: str) -> None:
        """Ends the sums of a batch that has its receipt."""
        self._batches.pop(batch_id, None)
        self._changed_batches.discard(batch_id)

    def _split(self, batch_id: str, watched: WatchedBatch, until_s: float) -> None:
        if self.uses is None or until_s <= watched.split_until_s:
            return
        watched.sums.spend(self.uses.parts(watched.split_until_s, until_s, watched.share))
        self._batches[batch_id] = watched._replace(split_until_s=until_s)
        self._changed_batches.add(batch_id)

    # ---- what it stores ----

    def start(self) -> None:
        self._task = asyncio.create_task(self._store_again(), name="costs")

    async def stop(self) -> None:
        """Stores the sums."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            await self.store_now()

    async def _store_again(self) -> None:
        while True:
            await asyncio.sleep(STORE_EVERY_S)
            await self.store_now()

    async def store_now(self) -> None:
        """Stores what has changed; the next call repeats what fails."""
        until_s = (self._wall() - REPORT_S) // SPLIT_EVERY_S * SPLIT_EVERY_S
        for batch_id, watched in list(self._batches.items()):
            self._split(batch_id, watched, until_s)
        batches, self._changed_batches = self._changed_batches, set()
        days, self._changed_days = self._changed_days, set()
        today = int(self._wall() // DAY_S)
        try:
            if batches or days:
                known = [one for one in batches if one in self._batches]
                of_batches = {one: sums_encoder.encode(self._batches[one].sums).decode() for one in known}
                of_days = {of: self._days[of] for of in days}
                await self._store.write_beside(cost_rows.store_costs, self.run, of_batches, of_days)
                if today != self._day:
                    await self._store.write_beside(cost_rows.forget_costs, today)
                    self._days = {of: cost for of, cost in self._days.items() if of.day >= today - 1}
                    self._day = today
        except StoreUnavailableError:
            self._changed_batches |= batches
            self._changed_days |= days


def _plus(cost: KeyCost | None, device_s: float, prefill_tokens: int, decode_tokens: int) -> KeyCost:
    before = cost or KeyCost()
    return KeyCost(
        before.device_s + device_s, before.prefill_tokens + prefill_tokens, before.decode_tokens + decode_tokens
    )
