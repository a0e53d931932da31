"""Background tasks, which are awaited only at the stop."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from neaptide.server.batches.storing.disk_patience import ServerStoppingError

logger = logging.getLogger(__name__)


class Background:
    """Set of background tasks. Event loop only. ``when_one_fails`` is the log line for a task that raises."""

    def __init__(self, when_one_fails: str) -> None:
        self._when_one_fails = when_one_fails
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Starts the work, unless ``close`` came first: then the database says what is left to do."""
        if self._is_closed:
            work.close()
            return None
        task = asyncio.create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Starts no further task."""
        self._is_closed = True

    async def drain(self) -> None:
        """Waits for all tasks, including those that they start."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ServerStoppingError:
            return
        except Exception:
            logger.exception(self._when_one_fails)
