"""PostgreSQL, the database that several servers share.

It needs explicitly what SQLite has by default. Writes that check before they change (creating a batch, deleting a file
that a batch may need) run one at a time over all servers, under a lock that ends with their transaction. Other writes,
guarded by record locks, run concurrently.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.types.string import StrDumper

from neaptide.cluster.storage.bounded_connection import BoundedConnection
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.databases.engines import NUM_READERS, TwoEngines
from neaptide.server.batches.storing.databases.migrate import migrate
from neaptide.server.batches.storing.tables import metadata

MIN_VERSION = 13
"""Oldest accepted release. The tests run on 15."""
CONNECT_TIMEOUT_S = 3
LOCK_TIMEOUT_S = 8
"""Shorter than a call's deadline, so that the connection survives it and abandoned calls stop waiting."""
SERVER_LOCK_TIMEOUT_S = 3
FROZEN_TRANSACTION_S = 5
"""Silence of a server after which its transaction is rolled back and its locks are released."""
POOLER_ROUNDS = 4
_SHOWN_PARTS = ("host", "port", "user", "dbname")
"""Parts of an address's query that are shown; any other may be a password."""
ASK_PATIENCE_S = 10.0
"""Time for the database to return before a write with an interrupted COMMIT counts as unknown."""
_WRITE_LOCK, _SERVER_LOCK, _MIGRATION_LOCK = 0x6E65_6170_0001, 0x6E65_6170_0002, 0x6E65_6170_0003
_SOCKET_OPTIONS = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
_SCHEMES = ("postgresql", "postgresql+psycopg", "postgres")


def postgres_url(text: str) -> sa.URL:
    """The address, parsed. Raises StoreError if it is invalid. The message does not repeat it, as it may contain a
    password."""
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        raise StoreError("the store is not of the form postgresql://USER@HOST/DATABASE") from None
    if url.drivername not in _SCHEMES:
        raise StoreError(f"there is no store for {url.drivername}://; use postgresql://USER@HOST/DATABASE")
    return url.set(drivername="postgresql+psycopg")


class PostgresDatabase(TwoEngines):
    """One database of a PostgreSQL server, in schema ``public`` or the user's search path."""

    def __init__(self, url: sa.URL, is_shared: bool = False, limit_s: float = math.inf) -> None:
        """Makes the database.

        Args:
            is_shared: several servers use it, each with this set.
            limit_s: longest time of a query, even if its caller has stopped waiting.
        """
        super().__init__()
        self._url = url
        self._is_shared = is_shared
        self._limit_s = limit_s

    @property
    def name(self) -> str:
        query = {name: value if name in _SHOWN_PARTS else "***" for name, value in self._url.query.items()}
        shown = self._url.set(drivername="postgresql", query=query).render_as_string(hide_password=True)
        return shown.replace("%2A%2A%2A", "***")

    def open(self) -> None:
        """Opens the database. Raises StoreError: it does not answer, is too old, or was written by a newer version."""
        waits_ms = {"idle_in_transaction_session_timeout": FROZEN_TRANSACTION_S * 1000}
        waits_ms["lock_timeout"] = LOCK_TIMEOUT_S * 1000
        self._write_engine = self._engine(1)
        _on_connect(self._write_engine, lambda connection: _limit_waits(connection, waits_ms))
        _on_connect(self._write_engine, _join_others if self._is_shared else _keep_others_out)
        # Not for the writer, because a COMMIT's wait for a standby may count as part of its statement.
        query_ms = 0 if self._limit_s == math.inf else int(self._limit_s * 1000)
        readers = self._engine(NUM_READERS)
        _on_connect(readers, lambda connection: _limit_waits(connection, {**waits_ms, "statement_timeout": query_ms}))
        _on_connect(readers, _let_nul_find_nothing)
        self._read_engine = readers.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        try:
            self._refuse_a_pooler()
            with self._write_engine.connect() as conn:
                self._check(conn)
                with _one_at_a_time(conn):
                    migrate(conn)
        except sa.exc.DBAPIError as error:
            reason = str(error.orig).strip().splitlines()[0]
            raise StoreError(f"the database {self.name} cannot be used: {reason}") from error

    @contextmanager
    def transaction(self, is_exclusive: bool) -> Iterator[sa.Connection]:
        with self._writing().connect() as conn, conn.begin() as transaction:
            if is_exclusive:
                conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_WRITE_LOCK)))
            yield conn
            self._commit(conn, transaction, ASK_PATIENCE_S)

    def checkpoint(self) -> None:
        """Does nothing: PostgreSQL makes its own checkpoints."""

    @property
    def num_missing_commits(self) -> int:
        """Always 0, because the server's directory has no count."""
        return 0

    def accept_as_it_is(self) -> None:
        """Does nothing, as no missing commits are found."""

    def is_fault(self, error: BaseException) -> bool:
        """Whether the server is unreachable, shutting down, full, or has rolled back a slow transaction."""
        kinds = sa.exc.OperationalError | sa.exc.InterfaceError | sa.exc.InternalError | sa.exc.TimeoutError
        return isinstance(error, kinds) or (isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated)

    def is_conflict(self, error: BaseException) -> bool:
        """Whether two transactions waited for each other's locks (a deadlock)."""
        kinds = psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure
        return isinstance(error, sa.exc.DBAPIError) and isinstance(error.orig, kinds)

    def missing(self) -> str | None:
        """Always None: PostgreSQL manages its own files."""
        return None

    def stored_bytes(self, conn: sa.Connection) -> int:
        """Size of our tables with their indexes."""
        return sum(
            conn.execute(sa.select(sa.func.pg_total_relation_size(name))).scalar_one() for name in metadata.tables
        )

    def reusable_bytes(self, conn: sa.Connection) -> int:
        """Always 0: PostgreSQL does not report it."""
        return 0

    def problems(self, conn: sa.Connection) -> list[str]:
        """Always empty: PostgreSQL checks its pages itself when it reads them (``initdb --data-checksums``)."""
        return []

    def compact(self) -> None:
        """Marks the space of deleted records as free; files shrink only if their ends are free."""
        with self._writing().execution_options(isolation_level="AUTOCOMMIT").connect() as conn:
            for name in metadata.tables:
                conn.exec_driver_sql(f"VACUUM {name}")

    # ---- inside ----

    def _engine(self, pool_size: int) -> sa.Engine:
        known: dict[str, Any] = {
            "application_name": "neaptide",
            "connect_timeout": CONNECT_TIMEOUT_S,
            **_SOCKET_OPTIONS,
        }
        # The operator's address takes precedence.
        arguments = {name: value for name, value in known.items() if name not in self._url.query}
        engine = sa.create_engine(
            self._url, pool_size=pool_size, max_overflow=0, pool_pre_ping=True, connect_args=arguments
        )
        sa.event.listen(engine, "do_connect", _connect)
        return engine

    def _refuse_a_pooler(self) -> None:
        """Raises StoreError if sessions share a connection, as with PgBouncer in transaction mode.

        There, locks between servers have no effect, and settings of one session apply to others.
        """
        engine = self._engine(2)
        try:
            with engine.connect() as one, engine.connect() as other:
                if _told_pid(one) == _pid(one):
                    return
                # A pooler gives a transaction the connection that was freed last, or each in turn.
                seen = [{_pid(one), _pid(other)} for _ in range(POOLER_ROUNDS)]
        finally:
            engine.dispose()
        if any(len(pids) == 1 for pids in seen) or len(set.union(*seen)) > 2:
            raise StoreError(
                f"the database {self.name} is behind a connection pooler whose sessions share connections (PgBouncer: "
                "pool_mode = transaction or statement); use pool_mode = session, or the database's own address"
            )

    def _check(self, conn: sa.Connection) -> None:
        version = conn.dialect.server_version_info
        if version is not None and int(version[0]) < MIN_VERSION:
            raise StoreError(f"the database {self.name} is PostgreSQL {version[0]}; {MIN_VERSION} or newer is needed")
        encoding = conn.execute(sa.text("SHOW server_encoding")).scalar_one()
        conn.rollback()
        if encoding != "UTF8":
            raise StoreError(f"the database {self.name} has the encoding {encoding}; make one with UTF8")

    def _says_no(self, error: sa.exc.DBAPIError) -> bool:
        """Whether it is an error of the server, which still serves this connection."""
        return not error.connection_invalidated and getattr(error.orig, "sqlstate", None) is not None


def _connect(_dialect: object, _record: object, arguments: Any, parameters: Any) -> Any:
    return BoundedConnection.connect(*arguments, **parameters)


def _on_connect(engine: sa.Engine, set_up: Callable[[Any], None]) -> None:
    sa.event.listen(engine, "connect", lambda connection, _: set_up(connection))


def _told_pid(conn: sa.Connection) -> int:
    """Process id of the backend, as reported at the start of the session. A pooler makes one up."""
    connection: Any = conn.connection.driver_connection
    return int(connection.info.backend_pid)


def _pid(conn: sa.Connection) -> int:
    """Process id of the backend of this transaction."""
    pid = conn.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()
    conn.rollback()
    return int(pid)


def _limit_waits(dbapi_connection: Any, waits_ms: Mapping[str, int]) -> None:
    """Limits the waits of a session.

    They are set in the session, because a pooler would refuse them in the address; the operator's address takes
    precedence. ``synchronous_commit`` is switched on: acknowledged commits must survive a crash of the database,
    whatever its default.
    """
    with dbapi_connection.cursor() as cursor:
        cursor.execute(
            "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS wanted (name, value) "
            "JOIN pg_settings AS now USING (name) WHERE now.source <> 'client'",
            (list(waits_ms), [str(value) for value in waits_ms.values()]),
        )
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
    dbapi_connection.commit()


@contextmanager
def _one_at_a_time(conn: sa.Connection) -> Iterator[None]:
    """Lets one server at a time migrate: servers that start together would make the same tables.

    The others wait as long as it takes; the lock ends with the connection.
    """
    conn.execute(sa.text("SET LOCAL lock_timeout = 0"))
    conn.execute(sa.select(sa.func.pg_advisory_lock(_MIGRATION_LOCK)))
    conn.commit()
    try:
        yield
    finally:
        if not conn.invalidated:
            conn.rollback()
            conn.execute(sa.select(sa.func.pg_advisory_unlock(_MIGRATION_LOCK)))
            conn.commit()


def _keep_others_out(dbapi_connection: Any) -> None:
    """Lets only one server write to a database. The lock ends with the connection and is taken again with the next one.

    After a kill, the database may notice the end of the connection a moment later.
    """
    _take_server_lock(dbapi_connection, "pg_advisory_lock")


def _join_others(dbapi_connection: Any) -> None:
    """Lets several sharing servers in, but not together with one that does not share."""
    _take_server_lock(dbapi_connection, "pg_advisory_lock_shared")


def _take_server_lock(dbapi_connection: Any, function: str) -> None:
    with dbapi_connection.cursor() as cursor:
        try:
            cursor.execute(f"SET LOCAL lock_timeout = {int(SERVER_LOCK_TIMEOUT_S * 1000)}")
            cursor.execute(f"SELECT {function}(%s)", (_SERVER_LOCK,))
        except psycopg.errors.LockNotAvailable:
            raise psycopg.OperationalError("another neaptide server uses it") from None
    dbapi_connection.commit()


class _NulFindsNothing(StrDumper):
    """Replaces NUL in texts, which PostgreSQL cannot even compare with; ids made up by clients may contain it."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\ufffd"))


def _let_nul_find_nothing(dbapi_connection: Any) -> None:
    """For connections that only read."""
    dbapi_connection.adapters.register_dumper(str, _NulFindsNothing)
