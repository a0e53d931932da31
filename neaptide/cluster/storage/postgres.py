"""PostgreSQL: the database that several servers share.

What SQLite gives for nothing is asked for here: writes that look before they leap (a batch that is created, a file
that is deleted while a batch may want it) run one at a time over all servers, by a lock that ends with their
transaction. Results of lines and what else is guarded by row locks run beside each other.
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
"""What older releases lack is not known; the tests run on 15."""
CONNECT_TIMEOUT_S = 3
LOCK_TIMEOUT_S = 8
"""Within the deadline of a call, so that the connection outlives it; what was given up waits no longer, either."""
SERVER_LOCK_TIMEOUT_S = 3
FROZEN_TRANSACTION_S = 5
"""A transaction whose server says nothing for so long is undone: what it has locked is free again."""
POOLER_ROUNDS = 4
_SHOWN_PARTS = ("host", "port", "user", "dbname")
"""Of the query of an address; any other may be a password, or a misspelled one."""
ASK_PATIENCE_S = 10.0
"""For a database that comes back, before a write whose COMMIT was cut off is called unknown."""
_WRITE_LOCK, _SERVER_LOCK, _MIGRATION_LOCK = 0x6E65_6170_0001, 0x6E65_6170_0002, 0x6E65_6170_0003
_SOCKET_OPTIONS = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
_SCHEMES = ("postgresql", "postgresql+psycopg", "postgres")


def postgres_url(text: str) -> sa.URL:
    """Raises StoreError for what is no address of a PostgreSQL database. The message does not repeat it: it may hold a
    password."""
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        raise StoreError("the store is not of the form postgresql://USER@HOST/DATABASE") from None
    if url.drivername not in _SCHEMES:
        raise StoreError(f"there is no store for {url.drivername}://; use postgresql://USER@HOST/DATABASE")
    return url.set(drivername="postgresql+psycopg")


class PostgresDatabase(TwoEngines):
    """One database of a PostgreSQL server; its schema ``public``, or what the user's search path says."""

    def __init__(self, url: sa.URL, is_shared: bool = False, limit_s: float = math.inf) -> None:
        """``is_shared``: with other servers, each of which says so. ``limit_s``: the most that a query takes, should
        nobody wait for it any more."""
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
        """Raises StoreError: the database does not answer, is too old, or a newer version's."""
        waits_ms = {"idle_in_transaction_session_timeout": FROZEN_TRANSACTION_S * 1000}
        waits_ms["lock_timeout"] = LOCK_TIMEOUT_S * 1000
        self._write_engine = self._engine(1)
        _on_connect(self._write_engine, lambda connection: _limit_waits(connection, waits_ms))
        _on_connect(self._write_engine, _join_others if self._is_shared else _keep_others_out)
        # Not for the writer: nothing promises that a COMMIT's wait for a standby is no part of its statement.
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
        """As in ``Database``."""
        with self._writing().connect() as conn, conn.begin() as transaction:
            if is_exclusive:
                conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_WRITE_LOCK)))
            yield conn
            self._commit(conn, transaction, ASK_PATIENCE_S)

    def checkpoint(self) -> None:
        """PostgreSQL makes its own."""

    @property
    def num_missing_commits(self) -> int:
        """Nothing in a server's directory says."""
        return 0

    def accept_as_it_is(self) -> None:
        """Nothing was found missing."""

    def is_fault(self, error: BaseException) -> bool:
        """The server is away, shuts down, is full, or has undone a transaction that took too long."""
        kinds = sa.exc.OperationalError | sa.exc.InterfaceError | sa.exc.InternalError | sa.exc.TimeoutError
        return isinstance(error, kinds) or (isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated)

    def is_conflict(self, error: BaseException) -> bool:
        """A deadlock: each of two transactions waited for rows of the other."""
        kinds = psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure
        return isinstance(error, sa.exc.DBAPIError) and isinstance(error.orig, kinds)

    def missing(self) -> str | None:
        """What it writes is its own matter."""
        return None

    def stored_bytes(self, conn: sa.Connection) -> int:
        """Of our tables with their indexes."""
        return sum(
            conn.execute(sa.select(sa.func.pg_total_relation_size(name))).scalar_one() for name in metadata.tables
        )

    def reusable_bytes(self, conn: sa.Connection) -> int:
        """PostgreSQL does not say."""
        return 0

    def problems(self, conn: sa.Connection) -> list[str]:
        """PostgreSQL checks its pages itself when it reads them (``initdb --data-checksums``)."""
        return []

    def compact(self) -> None:
        """Marks the space of deleted rows as free; the files shrink only where their ends are free."""
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
        # What the operator's address says of these wins.
        arguments = {name: value for name, value in known.items() if name not in self._url.query}
        engine = sa.create_engine(
            self._url, pool_size=pool_size, max_overflow=0, pool_pre_ping=True, connect_args=arguments
        )
        sa.event.listen(engine, "do_connect", _connect)
        return engine

    def _refuse_a_pooler(self) -> None:
        """Raises StoreError where sessions share one connection, as behind PgBouncer in its transaction mode: there the
        locks that keep servers apart hold nothing, and what is set for one session holds for strangers' as well."""
        engine = self._engine(2)
        try:
            with engine.connect() as one, engine.connect() as other:
                if _told_pid(one) == _pid(one):
                    return
                # A pooler gives a transaction the connection that was free last, or each in turn.
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
        """An error of the server's, which goes on serving this connection."""
        return not error.connection_invalidated and getattr(error.orig, "sqlstate", None) is not None


def _connect(_dialect: object, _record: object, arguments: Any, parameters: Any) -> Any:
    return BoundedConnection.connect(*arguments, **parameters)


def _on_connect(engine: sa.Engine, set_up: Callable[[Any], None]) -> None:
    sa.event.listen(engine, "connect", lambda connection, _: set_up(connection))


def _told_pid(conn: sa.Connection) -> int:
    """The backend's process, as the start of the session told it. A pooler makes one up."""
    connection: Any = conn.connection.driver_connection
    return int(connection.info.backend_pid)


def _pid(conn: sa.Connection) -> int:
    """The process of the backend that this transaction has."""
    pid = conn.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()
    conn.rollback()
    return int(pid)


def _limit_waits(dbapi_connection: Any, waits_ms: Mapping[str, int]) -> None:
    """Set in the session, not in its address, which a pooler would refuse. What the operator's address says wins.

    A commit that was answered must survive a crash of the database, whatever the server's default is.
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
    """Servers that start together on a blank database would make the same tables. Whoever comes later waits as long as
    it takes; the lock ends with the connection."""
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
    """One server writes to a database at a time. The lock ends with the connection, and comes with the next one.

    Of a server that was killed it may take a moment until the database knows.
    """
    _take_server_lock(dbapi_connection, "pg_advisory_lock")


def _join_others(dbapi_connection: Any) -> None:
    """Servers that share go together, but not beside one that does not."""
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
    """PostgreSQL has no texts with NUL and refuses even to compare with one; ids that clients make up may hold it."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\ufffd"))


def _let_nul_find_nothing(dbapi_connection: Any) -> None:
    """Only where nothing is written."""
    dbapi_connection.adapters.register_dumper(str, _NulFindsNothing)
