"""A queue that runs one task at a time, with fair turns between tenants.

Fair queueing by virtual time: the tenant with the least served time, divided by its weight, is next. A new tenant
starts at the least value of those present, so unused time is not saved.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from neaptide.server.http.errors import OverloadedError


class FairQueue:
    """Fair queue of turns. Event loop only.

    Args:
        weight: of a tenant, as it is at the end of its turn. While both wait, a tenant of weight 2 is served for twice
            the time.
    """

    def __init__(self, weight: Callable[[str], float] = lambda _: 1.0) -> None:
        self._weight = weight
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._at_work: str | None = None
        self._served_s: dict[str, float] = {}
        """Served time divided by weight, by tenant, since the queue was last empty."""

    @asynccontextmanager
    async def turn(self, tenant: str, within_s: float | None = None) -> AsyncIterator[None]:
        """Holds the tenant's turn.

        Args:
            within_s: longest wait for it.

        Raises:
            OverloadedError: the turn did not come within that time.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._wait(tenant)
        except TimeoutError:
            raise OverloadedError(online=True, retry_after_s=max(1, math.ceil(within_s or 0.0))) from None
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            yield
        finally:
            self._served_s[tenant] += (loop.time() - begun_s) / self._weight(tenant)
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        self._enter(tenant)
        if self._at_work is None:
            self._at_work = tenant
            return
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(tenant, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            elif turn in queue:
                queue.remove(turn)
                self._drop_if_empty(tenant)
            raise

    def _enter(self, tenant: str) -> None:
        if self._at_work is None:
            self._served_s = {tenant: 0.0}
            return
        least_s = min(self._served_s[one] for one in (self._at_work, *self._waiting))
        self._served_s[tenant] = max(self._served_s.get(tenant, 0.0), least_s)

    def _pass_on(self) -> None:
        """Ends the turn and starts the next one."""
        self._at_work = None
        while self._waiting and self._at_work is None:
            tenant = min(self._waiting, key=self._served_s.__getitem__)
            turn = self._waiting[tenant].popleft()
            self._drop_if_empty(tenant)
            if not turn.cancelled():
                self._at_work = tenant
                turn.set_result(None)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._waiting[tenant]:
            del self._waiting[tenant]
