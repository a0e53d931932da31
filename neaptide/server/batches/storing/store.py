"""Store of files and batches: one writer and several readers on SQLite, or on the database of a ``BatchSharing``."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from neaptide.engine.private_files import make_private_directory
from neaptide.server.batches.sharing import BatchSharing, BlobStorage
from neaptide.server.batches.storing.data_dir import CACHE, FILES, DataDir, StoreError
from neaptide.server.batches.storing.databases import deadline
from neaptide.server.batches.storing.databases.deadline import DeadlineError, StuckError
from neaptide.server.batches.storing.databases.protocol import Database, OutcomeUnknownError
from neaptide.server.batches.storing.databases.readers import Readers
from neaptide.server.batches.storing.databases.sqlite import SqliteDatabase
from neaptide.server.batches.storing.databases.writer import Writer

P = ParamSpec("P")
T = TypeVar("T")


class StoreUnavailableError(Exception):
    """A read or write failed (disk full, I/O error, database unreachable); the same one may succeed later.

    A write did not happen, unless the error is a ``WriteUnknownError``.
    """


class WriteUnknownError(StoreUnavailableError):
    """A write's COMMIT got no answer in time, so it is not known whether it happened.

    It may still happen, but not after a later write of this server has succeeded.
    """


class Store:
    """Store of one server, opened once. Every method is safe on the event loop unless it is marked as blocking.

    A finished ``write`` is durable: it survives the death of the process and of the machine. Each read and write ends
    within ``limit_s``, successful or not.

    Args:
        sharing: the database and the storage of files; None for SQLite and files in the data directory.
    """

    def __init__(
        self,
        data_dir: Path,
        sharing: BatchSharing | None = None,
        limit_s: float = deadline.CALL_LIMIT_S,
    ) -> None:
        self.data_dir = data_dir
        self._sharing = sharing
        self.blobs: BlobStorage | None = None if sharing is None else sharing.blobs
        self.files_dir = data_dir / (FILES if self.blobs is None else CACHE)
        """Directory of the files' bytes, or of copies of them."""
        external = None if sharing is None else sharing.database(limit_s)
        self._directory = DataDir(data_dir, has_database=external is None)
        self.limit_s = limit_s
        self.database: Database = external or SqliteDatabase(self._directory.database, self._directory)
        self._writer: Writer | None = None
        self._readers: Readers | None = None
        self._failing = {"read": False, "write": False}
        self._num_stuck = 0

    def open(self, create: bool = True) -> None:
        """Locks the directory, migrates the database and starts the writer. Blocking.

        Args:
            create: make the data directory if it is missing.

        Raises:
            DataDirLockedError: another server uses the directory.
            StoreError: the directory or the database cannot be used.
        """
        self._directory.open(create)
        try:
            # Uploads must not go to a directory that is mounted over the original one.
            self._directory.note_place(*([self.files_dir] if self.blobs is None else []))
            self.database.open()
            self._settle()
            if self.blobs is not None:
                make_private_directory(self.files_dir)
        except BaseException:
            self.close()
            raise
        self._readers = Readers(self.database)
        self._start_writer()

    def _settle(self) -> None:
        try:
            with self.database.transaction(is_exclusive=True) as conn:
                if self._sharing is not None:
                    self._sharing.settle(conn)
        except OutcomeUnknownError as error:
            raise StoreError(f"the database {self.database.name} cannot be used: {error}") from error

    def close(self) -> None:
        """Commits queued writes and releases the directory. Blocking; safe to call twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        # Waits for abandoned reads, too: a WAL that stays behind would be applied to an older copy of the database.
        if self._readers is not None:
            readers, self._readers = self._readers, None
            readers.close()
        self.database.close()
        self._directory.close()

    def compact(self) -> None:
        """Returns the space of deleted records to the disk. Blocking; only while nothing else uses the store."""
        self._open_writer().close()
        self.database.compact()
        self._start_writer()

    def _start_writer(self) -> None:
        self._writer = Writer(self.database)
        self._writer.start()

    def missing(self) -> str | None:
        """Why the data directory is not the one that was opened; None if it is. Blocking."""
        return self.database.missing() or self._directory.missing()

    @property
    def num_commits(self) -> int:
        return self._open_writer().num_commits

    @property
    def failing(self) -> bool:
        """Whether the last read or write failed: the disk is full or broken, or the database is locked or
        unreachable."""
        return any(self._failing.values())

    @property
    def num_unknown(self) -> int:
        """Number of commits whose outcome stayed unknown."""
        return self._open_writer().num_unknown + self._num_stuck

    async def write(
        self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs an operation in the writer thread at once and waits until it is durable.

        Raises:
            WriteUnknownError: all of it was written, or nothing.
            StoreUnavailableError: nothing was written.
            Exception: the operation's own error; it is undone.
        """
        return await self._written(self._submit(lambda conn: operation(conn, *args, **kwargs)))

    async def write_grouped(self, operation: Callable[[sa.Connection], T], rows: int) -> T:
        """Like ``write_beside``, but waits up to 50 ms for other writes to share its commit."""
        return await self._written(self._submit(operation, rows, urgent=False, is_exclusive=False))

    async def write_beside(
        self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Like ``write``, for data guarded by record locks: other servers' writes may run at the same time."""
        return await self._written(self._submit(lambda conn: operation(conn, *args, **kwargs), is_exclusive=False))

    def _submit(
        self, operation: Callable[[sa.Connection], T], rows: int = 1, urgent: bool = True, is_exclusive: bool = True
    ) -> "Future[T]":
        return self._open_writer().submit(operation, rows, urgent, is_exclusive, self.limit_s)

    async def _written(self, submitted: "Future[T]") -> T:
        with self._watched("write"):
            return await deadline.answer_of(submitted, self.limit_s)

    def write_blocking(
        self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``write`` for worker threads."""
        submitted = self._submit(lambda conn: operation(conn, *args, **kwargs))
        with self._watched("write"):
            return deadline.wait_for_answer(submitted, self.limit_s)

    async def read(self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a query on a read-only connection in one of the store's threads; sees every finished write.

        Raises:
            StoreUnavailableError: there was no answer.
        """
        submitted = self._open_readers().submit(lambda conn: operation(conn, *args, **kwargs), self.limit_s)
        with self._watched("read"):
            return await deadline.answer_of(submitted, self.limit_s)

    def read_blocking(
        self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``read`` for worker threads."""
        submitted = self._open_readers().submit(lambda conn: operation(conn, *args, **kwargs), self.limit_s)
        with self._watched("read"):
            return deadline.wait_for_answer(submitted, self.limit_s)

    @contextmanager
    def _watched(self, kind: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            is_unknown = isinstance(error, OutcomeUnknownError | StuckError)
            if not is_unknown and not isinstance(error, DeadlineError) and not self.database.is_fault(error):
                raise
            self._failing[kind] = True
            if is_unknown and kind == "write":
                self._num_stuck += isinstance(error, StuckError)
                raise WriteUnknownError(str(error)) from error
            reason = getattr(error, "orig", error)
            raise StoreUnavailableError(f"a {kind} of the database failed: {reason}") from error
        self._failing[kind] = False

    def _open_readers(self) -> Readers:
        if self._readers is None:
            raise StoreUnavailableError("the store is closed")
        return self._readers

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise StoreUnavailableError("the store is closed")
        return self._writer
