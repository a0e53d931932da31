"""Traffic of the last hour, in bounded memory; the oldest is dropped first."""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from neaptide.engine.messages import Traffic
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.events import EngineLost

MAX_AGE_S = 3600.0
MAX_BYTES = 64 << 20
ANSWER_S = 60.0
"""Longest wait for the engine's present requests, which it reports between two steps."""


class NoAnswerError(Exception):
    """The engine did not report its present requests."""


class TrafficRing:
    """Records the traffic of an engine client. Keeps the pieces encoded, for the simulating child process. Event loop
    only.

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
        """When the previous engine was lost."""
        self._asked: asyncio.Future[bytes] | None = None
        client.subscribe(Traffic, self._on_traffic)
        client.subscribe(EngineLost, self._on_engine_lost)

    @property
    def first_s(self) -> float:
        """Start of the recorded traffic."""
        return max(self.since_s, self._pieces[0][0]) if self._pieces else math.inf

    @property
    def last_s(self) -> float:
        """Time of the last recorded traffic."""
        return self._pieces[-1][0] if self._pieces else -math.inf

    def _on_traffic(self, traffic: Traffic) -> None:
        if traffic.has_present:  # Answers the caller that asked. It is not kept, as it may be large.
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
        """Pieces since ``since_s``; the last one has the present requests.

        Raises:
            EngineUnavailableError: there is no engine to ask.
            NoAnswerError: the engine did not answer.
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
