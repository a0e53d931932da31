"""Tasks whose end nobody waits for until everything stops."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from neaptide.server.batches.storing.disk_patience import ServerStoppingError

logger = logging.getLogger(__name__)


class Background:
    """Event loop only. ``when_one_fails`` says in the log what a task that raises leaves behind."""

    def __init__(self, when_one_fails: str) -> None:
        self._when_one_fails = when_one_fails
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Begins the work, unless ``close`` came first: then the rows say what is left to do."""
        if self._is_closed:
            work.close()
            return None
        task = asyncio.create_task(self._logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Begins nothing more."""
        self._is_closed = True

    async def drain(self) -> None:
        """Returns when all that was begun has ended, and what it began."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ServerStoppingError:
            return
        except Exception:
            logger.exception(self._when_one_fails)
