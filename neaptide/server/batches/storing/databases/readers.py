"""Threads that read the database, so that hanging reads occupy no other thread of the server."""

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
    """One thread per reading connection, so that a running read never waits for a connection."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._threads = ThreadPoolExecutor(NUM_READERS, "batch-store-reader")

    def submit(self, operation: Callable[[sa.Connection], T], limit_s: float) -> "Future[T]":
        """Queues a query that fails after ``limit_s``; thread-safe."""
        return self._threads.submit(self._read, operation, time.monotonic() + limit_s)

    def _read(self, operation: Callable[[sa.Connection], T], until_s: float) -> T:
        with deadline.until(until_s):
            deadline.check()
            with self._database.reading() as conn:
                return operation(conn)

    def close(self) -> None:
        """Waits for all running and queued reads, and ends the threads. Blocking."""
        self._threads.shutdown()
