"""The one thread and connection of a server that write to the database, with several writes per commit.

SQLite before 3.51.3 can corrupt a WAL database when two connections write or checkpoint at once. With a single writer
that also makes every checkpoint, this cannot happen. Durability takes an ``fsync`` per commit, so writes that arrive
close together share one.
"""

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from neaptide.server.batches.storing.databases import deadline
from neaptide.server.batches.storing.databases.protocol import Database, OutcomeUnknownError

T = TypeVar("T")
Operation = Callable[[sa.Connection], Any]

MAX_GROUP_ROWS = 64
MAX_GROUP_DELAY_S = 0.05
QUIET_S = 1.0
"""Idle time after which the database makes a checkpoint."""
MAX_CONFLICTS = 5
"""Conflicts with other servers' transactions after which a group fails."""
ASK_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class _Write:
    operation: Operation
    future: "Future[Any]"
    rows: int
    urgent: bool
    is_exclusive: bool
    until_s: float


class Writer:
    """Runs operations one after another, each in a savepoint of a shared transaction.

    A future resolves after its transaction is durable. An operation that raises is undone alone. If the database is at
    fault (disk full, I/O error, connection lost), every operation of the group fails and none has happened. With
    OutcomeUnknownError, either all of them happened or none. Once a later operation succeeds, the unknown ones will not
    happen any more. An operation may run more than once until it happens.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batch-store-writer", daemon=True)
        self._closed = False
        self._is_settled = True
        """Whether nothing has been committed since the last checkpoint."""
        self._lock = threading.Lock()
        self.num_commits = 0
        self.num_unknown = 0
        """Number of groups whose outcome stayed unknown."""

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        operation: Callable[[sa.Connection], T],
        rows: int = 1,
        urgent: bool = True,
        is_exclusive: bool = True,
        limit_s: float = math.inf,
    ) -> "Future[T]":
        """Queues an operation; thread-safe.

        Args:
            urgent: commit without waiting for other writes; otherwise within 50 ms or with the 64th record.
            is_exclusive: as for ``Database.transaction``.
            limit_s: time after which an operation that is not durable fails. One that has not begun by then never runs,
                and its caller is expected to cancel it.

        Raises:
            RuntimeError: the writer is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the store is closed")
            until_s = time.monotonic() + limit_s
            self._queue.put(_Write(operation, future, rows, urgent, is_exclusive, until_s))
        return future

    def close(self) -> None:
        """Completes all queued operations, then ends the thread."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            group, closing = self._next_group()
            if group:
                self._commit_group(group)

    def _next_group(self) -> tuple[list[_Write], bool]:
        first = self._first()
        if first is None:
            return [], True
        group, rows = [first], first.rows
        deadline_s = time.monotonic() + MAX_GROUP_DELAY_S
        while rows < MAX_GROUP_ROWS:
            # An urgent write is joined only by writes that are already queued.
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

    def _first(self) -> _Write | None:
        try:
            return self._queue.get(timeout=None if self._is_settled else QUIET_S)
        except queue.Empty:
            self._database.checkpoint()
            self._is_settled = True
            return self._queue.get()

    def _commit_group(self, group: list[_Write]) -> None:
        self._is_settled = False
        now_s = time.monotonic()
        due = [write for write in group if write.until_s > now_s]
        running = [write for write in due if write.future.set_running_or_notify_cancel()]
        if not running:
            return
        try:
            with deadline.until(min(write.until_s for write in running)):
                outcomes = self._transact(running)
            self.num_commits += 1
        except Exception as error:
            self.num_unknown += isinstance(error, OutcomeUnknownError)
            outcomes = [_Failure(error)] * len(running)
        for write, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, _Failure):
                write.future.set_exception(outcome.error)
            else:
                write.future.set_result(outcome)

    def _transact(self, writes: list[_Write]) -> list[Any]:
        is_exclusive = any(write.is_exclusive for write in writes)
        for num_conflicts in itertools.count(1):
            outcomes: list[Any] = []
            try:
                with self._database.transaction(is_exclusive) as conn:
                    outcomes = [self._attempt(conn, write.operation) for write in writes]
                    # A COMMIT that cannot be awaited is not sent.
                    deadline.check()
                break
            except OutcomeUnknownError as unknown:
                if not self._learn_outcome(unknown):
                    raise unknown.error from None
                break
            except Exception as error:
                if not self._database.is_conflict(error) or num_conflicts == MAX_CONFLICTS:
                    raise
        return outcomes

    def _learn_outcome(self, unknown: OutcomeUnknownError) -> bool:
        """Whether the transaction was committed; no answer is better than a wrong one.

        Waits until the database can answer. Writes that arrive meanwhile fail at once, so that their callers learn of
        it.

        Raises:
            OutcomeUnknownError: the patience is over, the writer is to end, or the database cannot tell.
        """
        patience_s = min(unknown.patience_s, deadline.left_s())
        with deadline.until(time.monotonic() + patience_s):
            return self._asked(unknown)

    def _asked(self, unknown: OutcomeUnknownError) -> bool:
        while True:
            try:
                outcome = unknown.ask()
            except Exception as error:
                is_hopeless = not self._database.is_fault(error) or deadline.is_over()
                if is_hopeless or not self._fail_queued(error):
                    raise unknown from error
                continue
            if outcome is None:
                raise unknown
            return outcome

    def _fail_queued(self, error: Exception) -> bool:
        """Fails queued writes for a moment; returns False if the writer is to end."""
        deadline_s = time.monotonic() + ASK_INTERVAL_S
        while (wait_s := deadline_s - time.monotonic()) > 0:
            try:
                write = self._queue.get(timeout=wait_s)
            except queue.Empty:
                break
            if write is None:
                self._queue.put(None)
                return False
            if write.future.set_running_or_notify_cancel():
                write.future.set_exception(error)
        return True

    def _attempt(self, conn: sa.Connection, operation: Operation) -> Any:
        """The operation's result, or its own failure. Raises errors that concern the whole transaction."""
        try:
            with conn.begin_nested():
                return operation(conn)
        except Exception as error:
            if self._database.is_fault(error):
                # SQLite may have rolled back everything before it, too.
                raise
            return _Failure(error)


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception
