"""Threads for work on request bodies: parsing and tokenizing, which take a second for a megabyte.

Short bodies never wait for long ones. Long ones are worked on one at a time, keys by turns.
"""

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from neaptide.server.edge.fair_queue import FairQueue

LONG_BYTES = 64 << 10
"""Longer bodies are long: they take from some 50 ms."""
WAIT_S = 30.0
"""Longest wait of a long body for its turn."""
_SHORT_THREADS = 4
"""A burst of prompts must not take every core."""

T = TypeVar("T")


class BodyThreads:
    """Event loop only."""

    def __init__(self) -> None:
        self._short = CapacityLimiter(_SHORT_THREADS)
        self._turns = FairQueue()

    async def run(self, work: Callable[[], T], num_bytes: int, tenant: str) -> T:
        """The work's result.

        Args:
            num_bytes: of the body that it works on.
            tenant: whose turn a long one takes.

        Raises:
            OverloadedError: the turn of a long one has not come in time.
        """
        if num_bytes <= LONG_BYTES:
            return await anyio.to_thread.run_sync(work, limiter=self._short)
        async with self._turns.turn(tenant, WAIT_S):
            return await anyio.to_thread.run_sync(work, limiter=CapacityLimiter(1))
