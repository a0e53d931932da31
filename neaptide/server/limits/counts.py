"""Counts of all keys on one server: the interface, and the counts of a server that has its database to itself."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from neaptide.server.batches.storing import usage_rows
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from neaptide.server.limits.usage import Excess, KeyLimits, KeyUsage, Level, LimitName, Place, Times

logger = logging.getLogger(__name__)

SLOT_S = 0.1
STORE_EVERY_S = 1.0
"""Time between two writes of the day's counts; what a kill may lose."""

Amounts = Mapping[LimitName, int]


class Taken(NamedTuple):
    """Amounts that were counted for one request."""

    by: "Counts"
    place: Place


class Counts(Protocol):
    """Counts of what keys use. Event loop only."""

    async def start(self) -> None:
        """Begins, with the stored counts."""
        ...

    async def stop(self) -> None:
        """Stores the counts."""
        ...

    def refusal(self, tenant: str, limits: KeyLimits) -> Excess | None:
        """Why the smallest request has no room, as far as that is known without asking."""
        ...

    async def take(self, tenant: str, limits: KeyLimits, amounts: Amounts) -> Taken | Excess:
        """Counts the amounts if all of them fit, else nothing."""
        ...

    def levels(self, tenant: str, limits: KeyLimits) -> dict[LimitName, Level]:
        """Use of each limit, as far as this server knows."""
        ...

    def add(self, tenant: str, amounts: Amounts) -> None:
        """Counts amounts that have already been used."""
        ...

    def give_back(self, tenant: str, amounts: Amounts, place: Place) -> None:
        """Counts amounts of ``place`` no longer."""
        ...


class OwnCounts:
    """Counts in memory.

    Args:
        clock: steady seconds, for minutes.
        wall_clock: unix seconds, for days.
        store: where the counts of days are kept; None: nowhere.
    """

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float], store: Store | None = None) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._store = store
        self._usage: dict[str, KeyUsage] = {}
        self._changed: set[str] = set()
        self._storing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """As in ``Counts``. Without an answer of the database all counts begin at 0."""
        if self._store is None:
            return
        try:
            found = await self._store.read(usage_rows.stored)
        except StoreUnavailableError as error:
            logger.warning("the counts of API keys cannot be read, and begin at 0: %s", error)
            found = {}
        for tenant, encoded in found.items():
            try:
                self._of(tenant).decode(encoded)
            except msgspec.MsgspecError:
                logger.warning("the counts of API key %s cannot be read, and begin at 0", tenant[:8])
            self._of(tenant).forget_minutes()
        self._storing = asyncio.create_task(self._store_again(), name="counts of keys")

    async def stop(self) -> None:
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.gather(self._storing, return_exceptions=True)
            await self._store_now()

    def refusal(self, tenant: str, limits: KeyLimits) -> Excess | None:
        return self._of(tenant).excess(limits, dict.fromkeys(LimitName, 1), self._now)

    async def take(self, tenant: str, limits: KeyLimits, amounts: Amounts) -> Taken | Excess:
        usage, now = self._of(tenant), self._now
        excess = usage.take(limits, amounts, now)
        if excess is not None:
            return excess
        self._changed.add(tenant)
        return Taken(self, usage.place(now))

    def levels(self, tenant: str, limits: KeyLimits) -> dict[LimitName, Level]:
        return {name: self._of(tenant).level(name, self._now) for name, _ in limits.items()}

    def add(self, tenant: str, amounts: Amounts) -> None:
        self._changed.add(tenant)
        for name, amount in amounts.items():
            self._of(tenant).add(name, amount, self._now)

    def give_back(self, tenant: str, amounts: Amounts, place: Place) -> None:
        self._changed.add(tenant)
        for name, amount in amounts.items():
            self._of(tenant).give_back(name, amount, place)

    @property
    def _now(self) -> Times:
        return Times(self._clock(), self._wall_clock())

    def _of(self, tenant: str) -> KeyUsage:
        if tenant not in self._usage:
            self._usage[tenant] = KeyUsage(SLOT_S)
        return self._usage[tenant]

    async def _store_again(self) -> None:
        while True:
            await asyncio.sleep(STORE_EVERY_S)
            await self._store_now()

    async def _store_now(self) -> None:
        """Stores what has changed; the next call repeats what fails."""
        changed, self._changed = self._changed, set()
        if self._store is None or not changed:
            return
        try:
            await self._store.write_beside(
                usage_rows.store, {tenant: self._of(tenant).encoded_days() for tenant in changed}
            )
        except StoreUnavailableError:
            self._changed |= changed
