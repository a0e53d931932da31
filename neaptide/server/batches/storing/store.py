"""The database of files and batches: one writer, read-only readers, migrations."""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from neaptide.server.batches.storing.data_dir import DataDir, StoreError
from neaptide.server.batches.storing.writer import Writer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

NUM_READERS = 4
BUSY_TIMEOUT_S = 30.0
MAX_WAL_BYTES = 64 << 20
"""What stays of the write-ahead log after a checkpoint, once a long read has let it grow."""
CHECK_TIME_S = 3.0
"""At start, for looking for damage; about 1 GB of database is looked through in it."""


class StoreUnavailableError(Exception):
    """A read or write did not happen (disk full, I/O error, locked); the same one may succeed later."""


class Store:
    """Opened once by a server; every method is safe on the event loop.

    A finished ``write`` is durable: it survives the death of the process and of the machine.
    """

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._directory = DataDir(data_dir)
        self._writer: Writer | None = None
        self._write_engine: sa.Engine | None = None
        self._read_engine: sa.Engine | None = None
        self._num_reading = 0
        self._read_ended = threading.Condition()
        """Guards the count, and the read engine while it is taken away."""
        self.failing = False
        """The last write did not happen: the disk is full, broken, or the database locked."""

    def open(self, create: bool = True) -> None:
        """Locks the directory, migrates the database and starts the writer. Blocking.

        Args:
            create: whether to make a data directory where there is none.

        Raises:
            DataDirLockedError: another server holds the directory.
            StoreError: the directory or the database cannot be used.
        """
        self._directory.open(create)
        path = self._directory.database
        try:
            self._write_engine = _write_engine(path)
            with self._write_engine.connect() as conn:
                _check(conn)
                _migrate(conn)
            self._read_engine = _read_engine(path)
        except (sa.exc.DatabaseError, sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self.close()
            raise StoreError(f"the database {path} cannot be opened: {getattr(error, 'orig', error)}") from error
        except BaseException:
            self.close()
            raise
        self._writer = Writer(self._write_engine)
        self._writer.start()

    def close(self) -> None:
        """Commits what is queued and releases the directory. Blocking; safe to call twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        # Readers first, also those whose caller is gone: the last connection to close tidies the WAL up, and readers
        # may not. A WAL that stays behind would be applied to an older copy of the database.
        with self._read_ended:
            readers, self._read_engine = self._read_engine, None
            self._read_ended.wait_for(lambda: self._num_reading == 0)
        for engine in (readers, self._write_engine):
            if engine is not None:
                engine.dispose()
        self._write_engine = None
        self._directory.close()

    def compact(self) -> None:
        """Gives the space of deleted rows back to the disk. Blocking; only where nothing else uses the store."""
        assert self._write_engine is not None
        self._open_writer().close()
        with self._write_engine.connect() as conn:
            dbapi_connection: Any = conn.connection.driver_connection
            for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
                dbapi_connection.execute(statement).close()
        self._writer = Writer(self._write_engine)
        self._writer.start()

    @property
    def num_commits(self) -> int:
        return self._open_writer().num_commits

    async def write(
        self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs an operation in the writer thread at once and waits until it is durable.

        Raises:
            StoreUnavailableError: nothing was written.
            Exception: whatever the operation itself raised; it is undone.
        """
        submitted = self._open_writer().submit(lambda conn: operation(conn, *args, **kwargs))
        with self._watched():
            return await asyncio.wrap_future(submitted)

    async def write_grouped(self, operation: Callable[[sa.Connection], T], rows: int) -> T:
        """Like ``write``, but waits up to 50 ms for other writes to share its commit."""
        with self._watched():
            return await asyncio.wrap_future(self._open_writer().submit(operation, rows, urgent=False))

    def write_blocking(
        self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``write`` for worker threads."""
        with self._watched():
            return self._open_writer().submit(lambda conn: operation(conn, *args, **kwargs)).result()

    async def read(self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a query on a read-only connection in a worker thread; sees every finished write."""
        return await asyncio.to_thread(lambda: self.read_blocking(operation, *args, **kwargs))

    def read_blocking(
        self, operation: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``read`` for worker threads."""
        try:
            with self._reading() as engine, engine.connect() as conn:
                return operation(conn, *args, **kwargs)
        except (sa.exc.OperationalError, sqlite3.OperationalError) as error:
            raise StoreUnavailableError(f"the database cannot be read: {getattr(error, 'orig', error)}") from error

    @contextmanager
    def _reading(self) -> Iterator[sa.Engine]:
        with self._read_ended:
            if self._read_engine is None:
                raise StoreUnavailableError("the store is closed")
            engine = self._read_engine
            self._num_reading += 1
        try:
            yield engine
        finally:
            with self._read_ended:
                self._num_reading -= 1
                self._read_ended.notify_all()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.OperationalError, sqlite3.OperationalError) as error:
            self.failing = True
            reason = getattr(error, "orig", error)
            raise StoreUnavailableError(f"the database did not take the write: {reason}") from error
        self.failing = False

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise StoreUnavailableError("the store is closed")
        return self._writer


def _on_begin(statement: str) -> Callable[[sa.Connection], None]:
    def begin(conn: sa.Connection) -> None:
        conn.exec_driver_sql(statement)

    return begin


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
        sa.URL.create("sqlite", database=str(path)),
        pool_size=1,
        max_overflow=0,
        connect_args={"timeout": BUSY_TIMEOUT_S},
    )
    sa.event.listen(engine, "connect", set_up)
    sa.event.listen(engine, "begin", _on_begin("BEGIN IMMEDIATE"))
    return engine


def _read_engine(path: Path) -> sa.Engine:
    def connect() -> sqlite3.Connection:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.QueuePool, pool_size=NUM_READERS)
    # A real transaction, so that an operation with several queries sees one state.
    sa.event.listen(engine, "begin", _on_begin("BEGIN"))
    return engine


def _check(conn: sa.Connection) -> None:
    """Refuses a damaged database at start rather than serve wrong results from it later."""
    deadline_s = time.monotonic() + CHECK_TIME_S
    dbapi_connection: Any = conn.connection.driver_connection
    # Any true value interrupts the query.
    dbapi_connection.set_progress_handler(lambda: time.monotonic() > deadline_s, 10_000)
    try:
        found = conn.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
    except sa.exc.OperationalError:
        if time.monotonic() < deadline_s:
            raise
        logger.warning("the database is too large to be checked whole in %.0f s", CHECK_TIME_S)
        found = "ok"
    finally:
        dbapi_connection.set_progress_handler(None, 0)
        conn.rollback()
    if found != "ok":
        raise StoreError(f"the database {conn.engine.url.database} is damaged: {str(found).splitlines()[-1]}")


def _migrate(conn: sa.Connection) -> None:
    with resources.as_file(resources.files("neaptide.server.batches.storing") / "migrations") as scripts:
        config = Config()
        # The option is a format string.
        config.set_main_option("script_location", str(scripts).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = conn
        head = ScriptDirectory.from_config(config).get_current_head()
        current = MigrationContext.configure(conn).get_current_revision()
        conn.rollback()
        if current == head:
            return
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if current is not None and current not in known:
            raise StoreError(f"the data directory was written by a newer neaptide (schema {current})")
        logger.info("migrating the database from schema %s to %s", current or "blank", head)
        command.upgrade(config, "head")
        conn.commit()
