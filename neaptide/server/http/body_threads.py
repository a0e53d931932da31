"""Threads for work on request bodies: parsing and tokenizing, which take a second per megabyte.

Short bodies never wait for long ones. Long ones are processed one at a time, with turns between keys.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from neaptide.server.http.fair_queue import FairQueue

LONG_BYTES = 64 << 10
"""Size from which a body is long; such bodies take at least 50 ms."""
WAIT_S = 30.0
"""Longest wait of a long body for its turn."""
_SHORT_THREADS = 4
"""Number of threads for short bodies; a burst of prompts must not take every core."""

T = TypeVar("T")


class BodyThreads:
    """Runs the work on bodies in threads. Event loop only."""

    def __init__(self) -> None:
        # A thread takes the next body by itself. With a limiter of the loop it would wait for two turns of the loop.
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "short body")
        self._turns = FairQueue()

    async def run(self, work: Callable[[], T], num_bytes: int, tenant: str) -> T:
        """Runs ``work`` in a thread and returns its result.

        Args:
            num_bytes: size of the body.
            tenant: whose turn a long body takes.

        Raises:
            OverloadedError: the turn of a long body did not come in time.
        """
        if num_bytes <= LONG_BYTES:
            return await asyncio.get_running_loop().run_in_executor(self._short, work)
        async with self._turns.turn(tenant, WAIT_S):
            return await anyio.to_thread.run_sync(work, limiter=CapacityLimiter(1))
