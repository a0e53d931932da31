"""PgBouncer before the tests' PostgreSQL server, where it is installed; else tests that need it are skipped."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.patience import until_here
from tests.postgres import USER, PostgresServer

_PORT = 6432


@contextmanager
def pgbouncer(server: PostgresServer, mode: str, round_robin: bool = False) -> Iterator[Path]:
    """The directory of its socket. ``mode``: its ``pool_mode``. ``round_robin``: not what was free last is used."""
    program = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if program is None:
        pytest.skip("PgBouncer is not installed (Debian: apt-get install pgbouncer)")
    directory = Path(tempfile.mkdtemp(prefix="neaptide-pb-", dir="/tmp"))
    (directory / "users").write_text(f'"{USER}" ""\n')
    (directory / "ini").write_text(
        f"[databases]\n* = host={server.directory}\n[pgbouncer]\nlisten_addr =\nlisten_port = {_PORT}\n"
        f"unix_socket_dir = {directory}\nauth_type = trust\nauth_file = {directory}/users\npool_mode = {mode}\n"
        f"server_round_robin = {int(round_robin)}\n"
    )
    as_other: dict[str, Any] = {}
    if os.geteuid() == 0:  # It refuses to be root's.
        other = pwd.getpwnam("postgres")
        os.chown(directory, other.pw_uid, other.pw_gid)
        as_other = {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([program, str(directory / "ini")], stdout=log, stderr=log, **as_other)
    try:
        until_here(lambda: _answers(directory), lambda: (directory / "log").read_text())
        yield directory
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


def _answers(directory: Path) -> bool:
    with (
        suppress(psycopg.OperationalError),
        psycopg.connect(host=str(directory), port=_PORT, user=USER, dbname="postgres", autocommit=True),
    ):
        return True
    return False


def url(directory: Path, database: str) -> str:
    return f"postgresql://{USER}@/{database}?host={directory}&port={_PORT}"
