"""The few threads that read the database, so that reads which hang keep no other thread of the server."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import sqlalchemy as sa

from neaptide.server.batches.storing.databases import deadline
from neaptide.server.batches.storing.databases.engines import NUM_READERS
from neaptide.server.batches.storing.databases.protocol import Database

T = TypeVar("T")


class Readers:
    """One thread for each connection that only reads: a read which has a thread never waits for a connection."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(NUM_READERS, "batch-store-reader")

    def submit(self, operation: Callable[[sa.Connection], T], limit_s: float) -> "Future[T]":
        """Queues a query, which has failed if it has not ended by then; thread-safe."""
        return self._threads.submit(self._read, operation, time.monotonic() + limit_s)

    def _read(self, operation: Callable[[sa.Connection], T], until_s: float) -> T:
        with deadline.until(until_s):
            deadline.check()
            with self._database.reading() as conn:
                return operation(conn)

    def close(self) -> None:
        """Ends every read that is under way or queued, and the threads. Blocking."""
        self._threads.shutdown()
