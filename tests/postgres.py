"""A PostgreSQL server of the tests' own, where its programs are installed; else tests that need one are skipped."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.storing.store import Store
from neaptide.server.batches.storing.tables import metadata
from tests.patience import until_here

USER = "neaptide"
TEMPLATE = "blank"


def programs() -> Path | None:
    """Where ``initdb`` and ``postgres`` are, the newest first; Debian keeps them off the path."""
    on_path = shutil.which("postgres")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
    return Path(on_path).parent if on_path is not None else found[-1].parent if found else None


class PostgresServer:
    """Listens on a socket in a directory of its own. As root it runs as ``postgres``, for it refuses to be root's."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._as_other: dict[str, Any] = {}
        # Not below pytest's directories, which other users do not reach; a socket's path has to be short, too.
        self.directory = Path(tempfile.mkdtemp(prefix="neaptide-pg-", dir="/tmp"))
        if os.geteuid() == 0:
            other = pwd.getpwnam("postgres")
            self._as_other = {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}
            os.chown(self.directory, other.pw_uid, other.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_databases = 0

    def create(self) -> None:
        """Makes the files of a blank server and starts it; its template has our tables."""
        options = ["--auth=trust", f"--username={USER}", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run("initdb", "--pgdata", str(self.directory / "data"), *options)
        self.start()
        self.execute(f"CREATE DATABASE {TEMPLATE}")
        with tempfile.TemporaryDirectory() as data_dir:
            store = Store(Path(data_dir), sharing_of(self.url(TEMPLATE)))
            store.open()
            store.close()

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=self.directory, **self._as_other)

    def start(self) -> None:
        # Without fsync: what the tests kill is the server, not the machine.
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.directory), "fsync": "off"}
        command = [str(self._programs / "postgres"), "-D", str(self.directory / "data")]
        command += [f"--{name}={value}" for name, value in settings.items()]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory, **self._as_other)
        until_here(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "log").read_text()[-2000:]
        with suppress(psycopg.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """At once, as after a crash: open transactions are lost, and the next start recovers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.directory)

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.directory}"

    def connect(self, database: str = "postgres") -> "psycopg.Connection[Any]":
        return psycopg.connect(host=str(self.directory), user=USER, dbname=database, autocommit=True)

    def execute(self, statement: str) -> None:
        command: LiteralString = statement  # type: ignore[assignment]
        with self.connect() as connection:
            connection.execute(command)

    def new_database(self, template: str = TEMPLATE) -> str:
        """Its name."""
        self._num_databases += 1
        name = f"test_{self._num_databases}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def cut_off(self, database: str) -> None:
        """Nobody reaches the database any more, and who did is thrown out."""
        self.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        self.execute(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{database}'")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    found = programs()
    if found is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    if os.geteuid() == 0 and "postgres" not in {user.pw_name for user in pwd.getpwall()}:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    server = PostgresServer(found)
    try:
        server.create()
        yield server
    finally:
        server.remove()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """A database with our tables and no rows."""
    return postgres_server.url(postgres_server.new_database())


@pytest.fixture(scope="session")
def swept_database(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """For tests that hold on every database: one of which the next test finds the tables blank."""
    if request.param == "sqlite":
        yield None
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name: str = request.getfixturevalue("swept_database")
    yield server.url(name)
    with server.connect(name) as connection:
        connection.execute(f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY")  # type: ignore[arg-type]
