"""The one thread and one connection that write to the database, many small writes to a commit.

SQLite before 3.51.3 can corrupt a WAL database when two connections write or checkpoint at once; with a
single writer that also does every checkpoint the case cannot arise. One ``fsync`` per commit is the price
of durability (``synchronous=FULL``), so writes that arrive close together share one.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

T = TypeVar("T")
Operation = Callable[[sa.Connection], Any]

MAX_GROUP_ROWS = 64
MAX_GROUP_DELAY_S = 0.05


@dataclass(frozen=True, slots=True)
class _Write:
    operation: Operation
    future: "Future[Any]"
    rows: int
    urgent: bool


class Writer:
    """Runs operations one after another, each in a savepoint of a shared transaction.

    A future resolves after its transaction is durable. An operation that raises undoes itself alone, unless the
    disk is to blame (full, I/O error): that fails every operation of the group, and none of them happened.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batch-store-writer", daemon=True)
        self._closed = False
        self._lock = threading.Lock()
        self.num_commits = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, operation: Callable[[sa.Connection], T], rows: int = 1, urgent: bool = True) -> "Future[T]":
        """Queues an operation; thread-safe.

        ``urgent`` commits without waiting for company; otherwise the commit comes within 50 ms or with
        the 64th row.

        Raises:
            RuntimeError: the writer is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the store is closed")
            self._queue.put(_Write(operation, future, rows, urgent))
        return future

    def close(self) -> None:
        """Finishes everything queued, then ends the thread."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._engine.connect() as conn:
            closing = False
            while not closing:
                group, closing = self._next_group()
                if group:
                    self._commit_group(conn, group)

    def _next_group(self) -> tuple[list[_Write], bool]:
        first = self._queue.get()
        if first is None:
            return [], True
        group, rows = [first], first.rows
        deadline_s = time.monotonic() + MAX_GROUP_DELAY_S
        while rows < MAX_GROUP_ROWS:
            # After an urgent write only what is already waiting comes along.
            wait_s = 0.0 if any(w.urgent for w in group) else deadline_s - time.monotonic()
            try:
                write = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if write is None:
                return group, True
            group.append(write)
            rows += write.rows
        return group, False

    def _commit_group(self, conn: sa.Connection, group: list[_Write]) -> None:
        running = [write for write in group if write.future.set_running_or_notify_cancel()]
        try:
            with conn.begin():
                outcomes = [self._attempt(conn, write.operation) for write in running]
                _require_transaction(conn)
            self.num_commits += 1
        except Exception as error:
            outcomes = [_Failure(error)] * len(running)
        for write, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, _Failure):
                write.future.set_exception(outcome.error)
            else:
                write.future.set_result(outcome)

    @staticmethod
    def _attempt(conn: sa.Connection, operation: Operation) -> Any:
        """The operation's result, or why it failed alone. Raises what concerns the whole transaction."""
        try:
            with conn.begin_nested():
                return operation(conn)
        except sa.exc.OperationalError:
            # A full or failing disk: SQLite may have rolled back everything before it, too.
            raise
        except Exception as error:
            return _Failure(error)


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception


def _require_transaction(conn: sa.Connection) -> None:
    """A transaction that SQLite has dropped on an error would "commit" without a word, and nothing of it be there."""
    dbapi_connection: Any = conn.connection.driver_connection
    if not dbapi_connection.in_transaction:
        raise sa.exc.OperationalError("COMMIT", {}, RuntimeError("the transaction was rolled back"))
