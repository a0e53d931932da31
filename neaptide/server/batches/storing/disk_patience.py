"""Retries for a failing disk: space and mounts may return, and no batch is ended meanwhile."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from neaptide.server.batches.storing.store import StoreUnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0


class ServerStoppingError(Exception):
    """The server stops; the work is left to the next start."""


class PatientDisk:
    """Retries steps that the disk refused, until ``stop``."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._refused: set[str] = set()

    @property
    def is_refusing(self) -> bool:
        """Whether a step of some batch waits for its next attempt."""
        return bool(self._refused)

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends all waits; steps that the disk refuses later are left to the next start."""
        self._stop.set()

    async def sleep(self, delay_s: float) -> None:
        """Sleeps; returns early when the server stops."""
        try:
            async with asyncio.timeout(delay_s):
                await self._stop.wait()
        except TimeoutError:
            return

    async def retry(self, batch_id: str, step: Callable[[], Awaitable[T]]) -> T:
        """The step's result, after retries. Raises ServerStoppingError if the server stops before it succeeds."""
        delay_s = FIRST_DELAY_S
        try:
            while True:
                try:
                    return await step()
                except (OSError, StoreUnavailableError) as error:
                    if self._stop.is_set():
                        raise ServerStoppingError from error
                    logger.error("batch %s waits for its storage: %s", batch_id, error)
                self._refused.add(batch_id)
                await self.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_DELAY_S)
        finally:
            self._refused.discard(batch_id)
