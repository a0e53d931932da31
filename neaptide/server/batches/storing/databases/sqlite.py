"""SQLite in the data directory: the database of a single server. One connection writes, the others only read."""

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
"""For a lock of another process, where no deadline comes first."""
MAX_WAL_BYTES = 64 << 20
"""What stays of the write-ahead log after a checkpoint, once a long read has let it grow."""
STEPS_BETWEEN_LOOKS = 10_000
"""Of a statement, between two looks at the deadline: less than a millisecond."""
ASK_PATIENCE_S = 1.0
"""For a disk that failed a COMMIT: its frames may lie in the log, where a crash would bring them back."""
CHECK_TIME_S = 3.0
"""At start, for looking for damage; about 1 GB of database is looked through in it."""


class SqliteDatabase(TwoEngines):
    """One file. The data directory's lock keeps other servers away from it.

    ``directory`` is where it lies, if somebody has opened that.
    """

    def __init__(self, path: Path, directory: DataDir | None = None) -> None:
        super().__init__()
        self._path = path
        self._directory = directory
        self._log_files: dict[Path, tuple[int, int]] = {}
        """Those beside the database which the writer has open."""
        self._count = CommitCount(path)

    @property
    def name(self) -> str:
        return str(self._path)

    def open(self) -> None:
        """Raises StoreError: the file is no database, damaged, or a newer version's."""
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
        """As in ``Database``. Only one connection writes, so that nothing can run beside it."""
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
            # It stands in files that may come back, or not.
            raise OutcomeUnknownError(error, _say_nothing, ASK_PATIENCE_S) from error
        self._count.note(number)

    @property
    def _log_paths(self) -> list[Path]:
        return [self._path.with_name(f"{self._path.name}{suffix}") for suffix in ("-wal", "-shm")]

    def missing(self) -> str | None:
        """As in ``Database``. SQLite goes on with files that have been deleted, and what it commits there is lost."""
        missing = None if self._directory is None else self._directory.missing()
        return missing or first_missing(self._log_files)

    def _require_place(self) -> None:
        missing = self.missing()
        if missing is not None:
            raise sa.exc.OperationalError("", {}, RuntimeError(missing))

    def _forget_log_files(self, *_: object) -> None:
        """A new connection may have new ones: the last one that is closed removes them."""
        self._log_files = {}

    def checkpoint(self) -> None:
        """As in ``Database``. It waits for no reader: what one still needs is left to the next time."""
        try:
            with self._writing().connect() as conn:
                dbapi_connection: Any = conn.connection.driver_connection
                dbapi_connection.execute("PRAGMA wal_checkpoint(PASSIVE)").close()
        except (sa.exc.DBAPIError, sqlite3.DatabaseError) as error:
            # The database may be away: the thread that asks for this is the only one that writes.
            logger.warning("the write-ahead log stays as it is: %s", error)

    def close(self) -> None:
        """As in ``Database``."""
        super().close()
        self._count.close()

    @property
    def num_missing_commits(self) -> int:
        """As in ``Database``."""
        return self._count.num_missing

    def accept_as_it_is(self) -> None:
        """As in ``Database``."""
        self._count.accept()

    def is_fault(self, error: BaseException) -> bool:
        """A full or failing disk, or a lock."""
        return isinstance(error, sa.exc.OperationalError | sqlite3.OperationalError)

    def is_conflict(self, error: BaseException) -> bool:
        """There is nothing beside a transaction that could be in its way."""
        return False

    def stored_bytes(self, conn: sa.Connection) -> int:
        """None outside the data directory."""
        return 0

    def reusable_bytes(self, conn: sa.Connection) -> int:
        """Of free pages."""
        names = ("freelist_count", "page_size")
        pages, page_bytes = (conn.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in names)
        return int(pages) * int(page_bytes)

    def problems(self, conn: sa.Connection) -> list[str]:
        """As in ``Database``."""
        found = [str(text) for text in conn.exec_driver_sql("PRAGMA integrity_check(10)").scalars()]
        return [text for text in found if text != "ok"]

    def compact(self) -> None:
        """As in ``Database``."""
        with self._writing().connect() as conn:
            dbapi_connection: Any = conn.connection.driver_connection
            for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                dbapi_connection.execute(statement).close()


def _say_nothing() -> None:
    """Whether a write happened whose files have vanished since: nobody knows."""


def _on_begin(statement: str) -> Callable[[sa.Connection], None]:
    def begin(conn: sa.Connection) -> None:
        dbapi_connection: Any = conn.connection.driver_connection
        wait_s = min(max(deadline.left_s(), 0.0), BUSY_TIMEOUT_S)
        # In whole tenths: the text is nearly always the same, and need not be parsed again.
        dbapi_connection.execute(f"PRAGMA busy_timeout = {math.ceil(wait_s * 10) * 100}").close()
        conn.exec_driver_sql(statement)

    return begin


def _end_at_deadline(dbapi_connection: sqlite3.Connection, _: object) -> None:
    """A statement that is past it is undone, and its transaction. What waits for the disk itself is not reached."""
    dbapi_connection.set_progress_handler(deadline.is_over, STEPS_BETWEEN_LOOKS)


def _write_engine(path: Path) -> sa.Engine:
    def set_up(dbapi_connection: sqlite3.Connection, _: object) -> None:
        # The driver's own transaction handling breaks savepoints; BEGIN is ours (see _on_begin).
        dbapi_connection.isolation_level = None
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"journal_size_limit={MAX_WAL_BYTES}",
        ):
            dbapi_connection.execute(f"PRAGMA {pragma}").close()

    engine = sa.create_engine(
        # Never made: a connection that is opened anew must not begin a blank database where ours is away.
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


def _check(conn: sa.Connection, path: Path) -> None:
    """Refuses a damaged database at start rather than serve wrong results from it later."""
    # Before the time begins to run: another process may hold the lock for a while.
    conn.begin()
    try:
        with deadline.until(time.monotonic() + CHECK_TIME_S):
            found = conn.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
    except sa.exc.OperationalError as error:
        if getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_INTERRUPT:
            raise
        logger.warning("the database is too large to be checked whole in %.0f s", CHECK_TIME_S)
        found = "ok"
    finally:
        conn.rollback()
    if found != "ok":
        raise StoreError(f"the database {path} is damaged: {str(found).splitlines()[-1]}")


def _require_transaction(conn: sa.Connection) -> None:
    """A transaction that SQLite has dropped on an error would "commit" without a word, and nothing of it be there."""
    dbapi_connection: Any = conn.connection.driver_connection
    if not dbapi_connection.in_transaction:
        raise sa.exc.OperationalError("COMMIT", {}, RuntimeError("the transaction was rolled back"))
