"""The recorded traffic of the last hour, in memory: what is older, or more than fits, is dropped."""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from neaptide.engine.messages import Traffic
from neaptide.server.link.engine_client import EngineClient
from neaptide.server.link.events import EngineLost

MAX_AGE_S = 3600.0
MAX_BYTES = 64 << 20
ANSWER_S = 60.0
"""For the engine to say what it has: it speaks between two steps."""


class NoAnswerError(Exception):
    """The engine did not say what it has."""


class TrafficRing:
    """Listens to an engine client. Pieces are kept as they came: the child that simulates reads them. Event loop only.

    Args:
        clock: ``CLOCK_MONOTONIC``.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._client = client
        self._clock = clock
        self._max_bytes = max_bytes
        self._pieces: deque[tuple[float, bytes]] = deque()
        self.num_bytes = 0
        self.since_s = -math.inf
        """When the engine before this one was lost."""
        self._asked: asyncio.Future[bytes] | None = None
        client.subscribe(Traffic, self._on_traffic)
        client.subscribe(EngineLost, self._on_engine_lost)

    @property
    def first_s(self) -> float:
        """Since when what was served is known."""
        return max(self.since_s, self._pieces[0][0]) if self._pieces else math.inf

    @property
    def last_s(self) -> float:
        """When something was served last."""
        return self._pieces[-1][0] if self._pieces else -math.inf

    def _on_traffic(self, traffic: Traffic) -> None:
        if traffic.has_present:  # for whoever asked; it is not kept: it may be large
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(traffic.piece)
            return
        self._pieces.append((self._clock(), traffic.piece))
        self.num_bytes += len(traffic.piece)
        oldest_s = self._clock() - MAX_AGE_S
        while self.num_bytes > self._max_bytes or self._pieces[0][0] < oldest_s:
            self.num_bytes -= len(self._pieces.popleft()[1])

    def _on_engine_lost(self, _: EngineLost) -> None:
        self.since_s = self._clock()
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(NoAnswerError)

    async def pieces(self, since_s: float) -> list[bytes]:
        """From that time on, up to now; the last one says what the engine has.

        Raises:
            EngineUnavailableError: there is none to ask.
            NoAnswerError: the engine does not say it.
        """
        if self._asked is None:
            self._client.ask_traffic()
            self._asked = asyncio.get_running_loop().create_future()
        asked = self._asked
        try:
            async with asyncio.timeout(ANSWER_S):
                present = await asyncio.shield(asked)
        except TimeoutError:
            raise NoAnswerError from None
        finally:
            self._asked = None
        return [piece for at_s, piece in self._pieces if at_s >= since_s] + [present]
