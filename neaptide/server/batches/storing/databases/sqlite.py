"""SQLite in the data directory, the database of a single server. One connection writes, the others only read."""

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from neaptide.server.batches.storing.data_dir import DataDir, StoreError, first_missing, identity_of
from neaptide.server.batches.storing.databases import deadline
from neaptide.server.batches.storing.databases.commit_count import CommitCount
from neaptide.server.batches.storing.databases.engines import NUM_READERS, TwoEngines
from neaptide.server.batches.storing.databases.migrate import migrate
from neaptide.server.batches.storing.databases.protocol import OutcomeUnknownError

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 30.0
"""Longest wait for a lock of another process, if no deadline comes first."""
MAX_WAL_BYTES = 64 << 20
"""Size of the write-ahead log that is kept after a checkpoint; a long read lets it grow."""
STEPS_BETWEEN_LOOKS = 10_000
"""Steps of a statement between two checks of the deadline; less than a millisecond."""
ASK_PATIENCE_S = 1.0
"""Time for a disk that failed a COMMIT: its frames may be in the log, where a crash would restore them."""
CHECK_TIME_S = 3.0
"""Longest integrity check at start, enough for about 1 GB."""


class SqliteDatabase(TwoEngines):
    """One database file. The data directory's lock keeps other servers away.

    ``directory`` is the opened data directory of the file, if there is one.
    """

    def __init__(self, path: Path, directory: DataDir | None = None) -> None:
        super().__init__()
        self._path = path
        self._directory = directory
        self._log_files: dict[Path, tuple[int, int]] = {}
        """Log files next to the database that the writer has open."""
        self._count = CommitCount(path)

    @property
    def name(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Opens the database. Raises StoreError: the file is not a database, is damaged, or was written by a newer
        version."""
        try:
            self._write_engine = _write_engine(self._path)
            sa.event.listen(self._write_engine, "connect", self._forget_log_files)
            with self._write_engine.connect() as conn:
                _check(conn, self._path)
                migrate(conn)
                self._count.open(conn)
            # Whatever happens to the log from now on, the file is a database with tables.
            self.checkpoint()
            self._read_engine = _read_engine(self._path)
        except (sa.exc.DatabaseError, sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise StoreError(f"the database {self._path} cannot be opened: {getattr(error, 'orig', error)}") from error

    @contextmanager
    def transaction(self, is_exclusive: bool) -> Iterator[sa.Connection]:
        """A transaction of the writer. Only one connection writes, so all are exclusive."""
        with self._writing().connect() as conn, conn.begin() as transaction:
            if not self._log_files:
                self._log_files = {path: identity_of(path) for path in self._log_paths if path.exists()}
            self._require_place()
            yield conn
            _require_transaction(conn)
            number = self._count.put(conn)
            self._commit(conn, transaction, ASK_PATIENCE_S)
        try:
            self._require_place()
        except sa.exc.OperationalError as error:
            # It is in files that may or may not return.
            raise OutcomeUnknownError(error, _say_nothing, ASK_PATIENCE_S) from error
        self._count.note(number)

    @property
    def _log_paths(self) -> list[Path]:
        return [self._path.with_name(f"{self._path.name}{suffix}") for suffix in ("-wal", "-shm")]

    def missing(self) -> str | None:
        """Why new data would not be found again. SQLite goes on with deleted files, and loses what it commits there."""
        missing = None if self._directory is None else self._directory.missing()
        return missing or first_missing(self._log_files)

    def _require_place(self) -> None:
        missing = self.missing()
        if missing is not None:
            raise sa.exc.OperationalError("", {}, RuntimeError(missing))

    def _forget_log_files(self, *_: object) -> None:
        """Forgets the log files, because the last connection removes them and a new one makes others."""
        self._log_files = {}

    def checkpoint(self) -> None:
        """Moves committed data to its place. Does not wait for readers: what they need is left to the next
        checkpoint."""
        try:
            with self._writing().connect() as conn:
                dbapi_connection: Any = conn.connection.driver_connection
                dbapi_connection.execute("PRAGMA wal_checkpoint(PASSIVE)").close()
        except (sa.exc.DBAPIError, sqlite3.DatabaseError) as error:
            # The database may be missing; this thread is the only writer and must go on.
            logger.warning("the write-ahead log could not be checkpointed: %s", error)

    def close(self) -> None:
        super().close()
        self._count.close()

    @property
    def num_missing_commits(self) -> int:
        return self._count.num_missing

    def accept_as_it_is(self) -> None:
        self._count.accept()

    def is_fault(self, error: BaseException) -> bool:
        """Whether the disk is full or failing, or the database is locked."""
        return isinstance(error, sa.exc.OperationalError | sqlite3.OperationalError)

    def is_conflict(self, error: BaseException) -> bool:
        """Always False: no other transaction runs."""
        return False

    def stored_bytes(self, conn: sa.Connection) -> int:
        """Always 0: all data is in the data directory."""
        return 0

    def reusable_bytes(self, conn: sa.Connection) -> int:
        """Size of the free pages."""
        names = ("freelist_count", "page_size")
        pages, page_bytes = (conn.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names)
        return int(pages) * int(page_bytes)

    def problems(self, conn: sa.Connection) -> list[str]:
        found = [str(text) for text in conn.exec_driver_sql("PRAGMA integrity_check(10)").scalars()]
        return [text for text in found if text != "ok"]

    def compact(self) -> None:
        with self._writing().connect() as conn:
            dbapi_connection: Any = conn.connection.driver_connection
            for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                dbapi_connection.execute(statement).close()


def _say_nothing() -> None:
    """Answer for a write whose files have vanished: it is not known whether it happened."""


def _on_begin(statement: str) -> Callable[[sa.Connection], None]:
    def begin(conn: sa.Connection) -> None:
        dbapi_connection: Any = conn.connection.driver_connection
        wait_s = min(max(deadline.left_s(), 0.0), BUSY_TIMEOUT_S)
        # In tenths of a second: the text is then nearly always the same and need not be parsed again.
        dbapi_connection.execute(f"PRAGMA busy_timeout = {math.ceil(wait_s * 10) * 100}").close()
        conn.exec_driver_sql(statement)

    return begin


def _end_at_deadline(dbapi_connection: sqlite3.Connection, _: object) -> None:
    """Rolls back a statement past the deadline with its transaction. Does not reach waits for the disk itself."""
    dbapi_connection.set_progress_handler(deadline.is_over, STEPS_BETWEEN_LOOKS)


def _write_engine(path: Path) -> sa.Engine:
    def set_up(dbapi_connection: sqlite3.Connection, _: object) -> None:
        # The driver's own transaction handling breaks savepoints; ``_on_begin`` sends BEGIN.
        dbapi_connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"journal_size_limit={MAX_WAL_BYTES}",
        ):
            dbapi_connection.execute(f"PRAGMA {pragma}").close()

    engine = sa.create_engine(
        # Never creates the file: a new connection must not start an empty database where ours is missing.
        sa.URL.create("sqlite", database=path.absolute().as_uri(), query={"mode": "rw", "uri": "true"}),
        pool_size=1,
        max_overflow=0,
        connect_args={"timeout": BUSY_TIMEOUT_S},
    )
    sa.event.listen(engine, "connect", set_up)
    sa.event.listen(engine, "connect", _end_at_deadline)
    sa.event.listen(engine, "begin", _on_begin("BEGIN IMMEDIATE"))
    return engine


def _read_engine(path: Path) -> sa.Engine:
    def connect() -> sqlite3.Connection:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.QueuePool, pool_size=NUM_READERS)
    sa.event.listen(engine, "connect", _end_at_deadline)
    # A real transaction, so that an operation with several queries sees one state.
    sa.event.listen(engine, "begin", _on_begin("BEGIN"))
    return engine


@contextmanager
def read_only(path: Path) -> Iterator[sa.Connection]:
    """A connection that only reads, also while a server uses the database. Raises StoreError: that is not possible."""
    engine = _read_engine(path)
    try:
        if not path.is_file():
            raise StoreError(f"there is no database {path}")
        with engine.connect() as conn:
            yield conn
    except sa.exc.DatabaseError as error:
        raise StoreError(f"the database {path} cannot be read: {error.orig}; start its server once") from error
    finally:
        engine.dispose()


def _check(conn: sa.Connection, path: Path) -> None:
    """Refuses a damaged database at start, rather than serve wrong results from it later."""
    # Before the deadline starts, as another process may hold the lock for a while.
    conn.begin()
    try:
        with deadline.until(time.monotonic() + CHECK_TIME_S):
            found = conn.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
    except sa.exc.OperationalError as error:
        if getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_INTERRUPT:
            raise
        logger.warning("the database is too large to be checked completely in %.0f s", CHECK_TIME_S)
        found = "ok"
    finally:
        conn.rollback()
    if found != "ok":
        raise StoreError(f"the database {path} is damaged: {str(found).splitlines()[-1]}")


def _require_transaction(conn: sa.Connection) -> None:
    """Refuses to commit a transaction that SQLite has dropped on an error: the COMMIT would succeed without its
    data."""
    dbapi_connection: Any = conn.connection.driver_connection
    if not dbapi_connection.in_transaction:
        raise sa.exc.OperationalError("COMMIT", {}, RuntimeError("the transaction was rolled back"))
