"""How long the event loop's turns are, and whether a request would be late for that alone.

One thread does the work of all connections in turns. Whoever wants it again waits for the rest of a turn, which takes
less than a millisecond while there is time to spare. Above the thread's ceiling each turn brings more than it ends:
turns grow, and first tokens come late although the engine is idle. Chats are then refused before their bodies are read,
while a refusal costs little.
"""

import asyncio
from collections import deque

from neaptide.server.http.errors import OverloadedError

PERIOD_S = 0.025
"""Seconds between two measurements."""
NUM_STANDING = 4
"""Measurements of which the least counts: work that piles up makes each turn long, one long call only one."""
TURNS_TO_FIRST_TOKEN = 10
"""Turns in which a chat's bytes become its first token's bytes (a test counts them)."""
OWN_SHARE = 0.5
"""Largest share of the TTFT target that the turns may take; the engine needs the rest."""


class LoopTurns:
    """Measures turns of the running event loop, from ``start`` to ``stop``.

    Args:
        ttft_slo_s: the server's target for first tokens.
    """

    def __init__(self, ttft_slo_s: float) -> None:
        self._longest_s = OWN_SHARE * ttft_slo_s / TURNS_TO_FIRST_TOKEN
        self._turns_s = deque([0.0] * NUM_STANDING, maxlen=NUM_STANDING)
        self._task: asyncio.Task[None] | None = None

    @property
    def standing_s(self) -> float:
        """Least of the last turns, in seconds."""
        return min(self._turns_s)

    def check(self) -> None:
        """Raises OverloadedError while turns take so much of the TTFT target that a further chat would miss it."""
        if self.standing_s > self._longest_s:
            raise OverloadedError(online=True, retry_after_s=1)

    def note(self, turn_s: float) -> None:
        self._turns_s.append(turn_s)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turns of the event loop")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PERIOD_S)
            begun_s = loop.time()
            await asyncio.sleep(0)  # until the next turn
            self.note(loop.time() - begun_s)
