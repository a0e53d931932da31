"""PostgreSQL, the database that several servers share.

Some writes depend on what they read: to create a batch, or to delete a file that a batch may need. SQLite runs all
writes one at a time. Here a lock does that for those writes, over all servers, until their transaction ends. Row locks
guard the other writes, results of lines among them, and these run concurrently.
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
"""Oldest supported release; the tests run on 15."""
CONNECT_TIMEOUT_S = 3
LOCK_TIMEOUT_S = 8
"""Less than the deadline of a call: the connection outlives a wait, and an abandoned call does not wait on."""
SERVER_LOCK_TIMEOUT_S = 3
FROZEN_TRANSACTION_S = 5
"""The database rolls back a transaction whose client is silent for this long, which frees its locks."""
POOLER_ROUNDS = 4
_SHOWN_PARTS = ("host", "port", "user", "dbname")
"""Query parameters of an address that messages show; any other may be a password, or a misspelled one."""
ASK_PATIENCE_S = 10.0
"""How long to wait for the database before a write whose COMMIT was cut off counts as unknown."""
_WRITE_LOCK, _SERVER_LOCK, _MIGRATION_LOCK = 0x6E65_6170_0001, 0x6E65_6170_0002, 0x6E65_6170_0003
_SOCKET_OPTIONS = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
_SCHEMES = ("postgresql", "postgresql+psycopg", "postgres")


def postgres_url(text: str) -> sa.URL:
    """Parses the address of a PostgreSQL database.

    Raises:
        StoreError: it is not one. The message does not repeat the address, which may hold a password.
    """
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
        """
        Args:
            is_shared: whether other servers use the database too; each of them must say so.
            limit_s: the database ends a query after this time, in case its caller waits no longer.
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
        """Connects, and makes or migrates the tables.

        Raises:
            StoreError: the database does not answer, is too old, or was migrated by a newer version.
        """
        waits_ms = {"idle_in_transaction_session_timeout": FROZEN_TRANSACTION_S * 1000}
        waits_ms["lock_timeout"] = LOCK_TIMEOUT_S * 1000
        self._write_engine = self._engine(1)
        _on_connect(self._write_engine, lambda connection: _limit_waits(connection, waits_ms))
        _on_connect(self._write_engine, _join_others if self._is_shared else _keep_others_out)
        # Not for the writer: the wait of a COMMIT for a standby may be part of its statement.
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
        """As in ``Database``: always 0, since no file tells."""
        return 0

    def accept_as_it_is(self) -> None:
        """Does nothing: no commit was found missing."""

    def is_fault(self, error: BaseException) -> bool:
        """Whether the server is away, shuts down, is full, or has rolled back a transaction that took too long."""
        kinds = sa.exc.OperationalError | sa.exc.InterfaceError | sa.exc.InternalError | sa.exc.TimeoutError
        return isinstance(error, kinds) or (isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated)

    def is_conflict(self, error: BaseException) -> bool:
        """Whether it is a deadlock: each of two transactions waited for rows of the other."""
        kinds = psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure
        return isinstance(error, sa.exc.DBAPIError) and isinstance(error.orig, kinds)

    def missing(self) -> str | None:
        """As in ``Database``: always None, since the files are the database's own."""
        return None

    def stored_bytes(self, conn: sa.Connection) -> int:
        """Size of our tables with their indexes."""
        return sum(
            conn.execute(sa.select(sa.func.pg_total_relation_size(name))).scalar_one() for name in metadata.tables
        )

    def reusable_bytes(self, conn: sa.Connection) -> int:
        """As in ``Database``: always 0, since PostgreSQL does not tell."""
        return 0

    def problems(self, conn: sa.Connection) -> list[str]:
        """As in ``Database``: none. PostgreSQL checks pages when it reads them (``initdb --data-checksums``)."""
        return []

    def compact(self) -> None:
        """Marks the space of deleted rows as free. Files shrink only if the free space is at their end."""
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
        # Values in the operator's address win.
        arguments = {name: value for name, value in known.items() if name not in self._url.query}
        engine = sa.create_engine(
            self._url, pool_size=pool_size, max_overflow=0, pool_pre_ping=True, connect_args=arguments
        )
        sa.event.listen(engine, "do_connect", _connect)
        return engine

    def _refuse_a_pooler(self) -> None:
        """Detects sessions that share one connection, as behind PgBouncer in its transaction mode.

        There the locks that keep servers apart have no effect, and the settings of one session reach other clients.

        Raises:
            StoreError: sessions share a connection.
        """
        engine = self._engine(2)
        try:
            with engine.connect() as one, engine.connect() as other:
                if _told_pid(one) == _pid(one):
                    return
                # A pooler gives a transaction the connection that was freed last, or each connection in turn.
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
        """Whether the server reported the error and still serves this connection."""
        return not error.connection_invalidated and getattr(error.orig, "sqlstate", None) is not None


def _connect(_dialect: object, _record: object, arguments: Any, parameters: Any) -> Any:
    return BoundedConnection.connect(*arguments, **parameters)


def _on_connect(engine: sa.Engine, set_up: Callable[[Any], None]) -> None:
    sa.event.listen(engine, "connect", lambda connection, _: set_up(connection))


def _told_pid(conn: sa.Connection) -> int:
    """The backend's process id, as reported when the session began. A pooler makes one up."""
    connection: Any = conn.connection.driver_connection
    return int(connection.info.backend_pid)


def _pid(conn: sa.Connection) -> int:
    """The process id of the backend that runs this transaction."""
    pid = conn.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()
    conn.rollback()
    return int(pid)


def _limit_waits(dbapi_connection: Any, waits_ms: Mapping[str, int]) -> None:
    """Sets time limits for the session. Values in the operator's address win.

    They are no part of the address, because a pooler would refuse them. An acknowledged commit must survive a crash of
    the database, whatever the server's default is.
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
    """Lets one server at a time make the tables, where several start together on a blank database.

    The others wait as long as it takes. The lock ends with the connection.
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
    """Lets no other server write to the database. Each new connection takes the lock again.

    After a server was killed, it may take a moment until the database notices and frees the lock.
    """
    _take_server_lock(dbapi_connection, "pg_advisory_lock")


def _join_others(dbapi_connection: Any) -> None:
    """Lets only servers write that share the database too."""
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
    """Replaces NUL in texts, which ids from clients may hold: PostgreSQL refuses even to compare with such a text."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\ufffd"))


def _let_nul_find_nothing(dbapi_connection: Any) -> None:
    """Makes queries with NUL find nothing. Only for connections that never write."""
    dbapi_connection.adapters.register_dumper(str, _NulFindsNothing)
