"""Counts of several servers in the database that they share.

A server leases a part of what is left of a key's limits, and counts requests against its lease without asking. So a
busy key costs each server about one write in two seconds, and near a limit one write for each request.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from neaptide.server.batches.storing import usage_rows
from neaptide.server.batches.storing.store import Store, StoreUnavailableError, WriteUnknownError
from neaptide.server.batches.storing.usage_rows import LEASE_S, Leased, Returned, Settlement
from neaptide.server.limits.counts import Amounts, OwnCounts, Taken
from neaptide.server.limits.usage import Excess, KeyLimits, Level, LimitName, Place

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""Longest wait of a request for the database."""
ALONE_S = 5.0
"""How long this server counts for itself after the database gave no answer."""
REFUSED_S = 0.25
"""How long a refusal answers further requests without asking, so that a busy client does not become writes."""
SETTLE_EVERY_S = 1.0


_NOWHERE = Place(0, 0)


@dataclass(slots=True)
class _Key:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    free: dict[LimitName, int] = field(default_factory=dict)
    """What is left of the lease."""
    used: dict[LimitName, int] = field(default_factory=dict)
    """What was used of it."""
    place: Place = _NOWHERE
    levels: dict[LimitName, Level] = field(default_factory=dict)
    until_s: float = -math.inf
    settlement: Settlement = field(default_factory=Settlement)
    excess: Excess | None = None
    """The last refusal."""
    refused_s: float = -math.inf

    def has(self, amounts: Amounts, limits: KeyLimits, now_s: float) -> bool:
        return now_s < self.until_s and all(self.free.get(name, -1) >= amounts[name] for name, _ in limits.items())

    def known_excess(self, amounts: Amounts, now_s: float) -> Excess | None:
        """The last refusal, if it holds for these amounts too."""
        excess, age_s = self.excess, now_s - self.refused_s
        if excess is None or age_s >= REFUSED_S or amounts[excess.name] < excess.wanted:
            return None
        wait_s = None if excess.wait_s is None else max(excess.wait_s - age_s, 0.0)
        return None if wait_s == 0.0 else excess._replace(wanted=amounts[excess.name], wait_s=wait_s)

    def take_settlement(self) -> Settlement:
        """What is to be settled, the rest of the lease included, which ends."""
        self.settlement.returned += [Returned(name, amount, self.place) for name, amount in self.free.items() if amount]
        self.free, self.until_s = {}, -math.inf
        settlement, self.settlement = self.settlement, Settlement()
        return settlement

    def put_back(self, settlement: Settlement) -> None:
        """Keeps what could not be settled for the next time."""
        self.settlement.returned += settlement.returned
        for name, amount in settlement.added.items():
            self.add(name, amount)

    def add(self, name: LimitName, amount: int) -> None:
        self.settlement.added[name] = self.settlement.added.get(name, 0) + amount


class LeasedCounts:
    """Counts that all servers of a database share. Implements ``Counts``.

    While the database gives no answer, this server counts for itself: chats do not wait for a database.

    Args:
        clock: steady seconds.
        alone: the counts for that time.
    """

    def __init__(self, store: Store, clock: Callable[[], float], alone: OwnCounts) -> None:
        self._store = store
        self._clock = clock
        self._alone = alone
        self._alone_until_s = -math.inf
        self._keys: dict[str, _Key] = {}
        self._settling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._settling = asyncio.create_task(self._settle_again(), name="counts of keys")

    async def stop(self) -> None:
        """As in ``Counts``. Returns leases, too."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
        for key in self._keys.values():
            key.until_s = -math.inf
        await self._settle_now()

    def refusal(self, tenant: str, limits: KeyLimits) -> Excess | None:
        now_s = self._clock()
        if now_s < self._alone_until_s:
            return self._alone.refusal(tenant, limits)
        key = self._of(tenant)
        excess = key.known_excess(dict.fromkeys(LimitName, 1), now_s)
        return excess if excess is not None and excess.name in dict(limits.items()) else None

    async def take(self, tenant: str, limits: KeyLimits, amounts: Amounts) -> Taken | Excess:
        key = self._of(tenant)
        if not key.has(amounts, limits, self._clock()):
            async with key.lock:
                now_s = self._clock()
                if now_s < self._alone_until_s:
                    return await self._alone.take(tenant, limits, amounts)
                if not key.has(amounts, limits, now_s):
                    if (excess := key.known_excess(amounts, now_s)) is not None:
                        return excess
                    leased = await self._lease(tenant, key, limits, amounts)
                    if leased is None:
                        self._alone_until_s = self._clock() + ALONE_S
                        return await self._alone.take(tenant, limits, amounts)
                    if leased.excess is not None:
                        key.excess, key.refused_s = leased.excess, self._clock()
                        return leased.excess
                return self._taken(key, limits, amounts)
        return self._taken(key, limits, amounts)

    def _taken(self, key: _Key, limits: KeyLimits, amounts: Amounts) -> Taken:
        for name, _ in limits.items():
            key.free[name] -= amounts[name]
            key.used[name] = key.used.get(name, 0) + amounts[name]
        return Taken(self, key.place)

    def levels(self, tenant: str, limits: KeyLimits) -> dict[LimitName, Level]:
        """As in ``Counts``: as of the last lease."""
        key = self._of(tenant)
        known = {name: key.levels.get(name, Level(0, 0.0)) for name, _ in limits.items()}
        return {name: Level(level.used - key.free.get(name, 0), level.reset_s) for name, level in known.items()}

    async def _lease(self, tenant: str, key: _Key, limits: KeyLimits, needs: Amounts) -> Leased | None:
        """A new lease; None: the database gives no answer."""
        wishes = {name: needs[name] + 2 * key.used.get(name, 0) for name, _ in limits.items()}
        begun_s = self._clock()
        settlement = key.take_settlement()
        try:
            async with asyncio.timeout(ASK_S):
                leased = await self._store.write_beside(usage_rows.lease, tenant, limits, needs, wishes, settlement)
        except (StoreUnavailableError, TimeoutError) as error:
            if isinstance(error, StoreUnavailableError) and not isinstance(error, WriteUnknownError):
                key.put_back(settlement)
            logger.warning("API keys are counted by this server alone for %.0f s: the database is away", ALONE_S)
            return None
        key.used = {}
        key.levels, key.place = leased.levels, leased.place
        if leased.excess is None:
            key.free, key.until_s = leased.amounts, begun_s + LEASE_S
        return leased

    def add(self, tenant: str, amounts: Amounts) -> None:
        for name, amount in amounts.items():
            self._of(tenant).add(name, amount)

    def give_back(self, tenant: str, amounts: Amounts, place: Place) -> None:
        returned = [Returned(name, amount, place) for name, amount in amounts.items() if amount]
        self._of(tenant).settlement.returned += returned

    def _of(self, tenant: str) -> _Key:
        if tenant not in self._keys:
            self._keys[tenant] = _Key()
        return self._keys[tenant]

    async def _settle_again(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_EVERY_S)
            await self._settle_now()

    async def _settle_now(self) -> None:
        """Settles what has been used and given back, and returns leases that are over."""
        now_s = self._clock()
        due: dict[str, Settlement] = {}
        for tenant, key in self._keys.items():
            has_lapsed = now_s >= key.until_s and any(key.free.values())
            if (has_lapsed or key.settlement.added or key.settlement.returned) and not key.lock.locked():
                due[tenant] = self._due(key, now_s)
        if not due:
            return
        try:
            await self._store.write_beside(usage_rows.settle, due)
        except WriteUnknownError:
            pass  # once more could count it twice
        except StoreUnavailableError:
            for tenant, settlement in due.items():
                self._of(tenant).put_back(settlement)

    def _due(self, key: _Key, now_s: float) -> Settlement:
        if now_s >= key.until_s:
            return key.take_settlement()
        settlement, key.settlement = key.settlement, Settlement()
        return settlement
