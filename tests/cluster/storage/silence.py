"""A PostgreSQL server that is silent and not gone: behind a proxy that keeps connections up, stopped, or locked."""

import os
import select
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from tests.postgres import USER, PostgresServer

_PORT_NAME = ".s.PGSQL.5432"


class SilentProxy:
    """Passes bytes on, but while it is silent: then it takes them, and holds them until it speaks again."""

    def __init__(self, server: PostgresServer) -> None:
        self._target = server.directory / _PORT_NAME
        self.directory = Path(tempfile.mkdtemp(prefix="neaptide-px-", dir="/tmp"))
        self._speaks = threading.Event()
        self._speaks.set()
        self._clients: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / _PORT_NAME))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.directory}"

    def close(self) -> None:
        self._speaks.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        (self.directory / _PORT_NAME).unlink()
        self.directory.rmdir()

    @contextmanager
    def silence(self) -> Iterator[None]:
        self._speaks.clear()
        try:
            yield
        finally:
            self._speaks.set()

    @property
    def num_open(self) -> int:
        """Connections that the client has not closed."""
        poll = select.poll()
        for client in self._clients:
            if client.fileno() >= 0:
                poll.register(client, select.POLLIN)
        return sum(client.fileno() >= 0 for client in self._clients) - sum(
            bool(event & select.POLLHUP) for _, event in poll.poll(0)
        )

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._clients.append(client)
        with client, socket.socket(socket.AF_UNIX) as server:
            self._speaks.wait()
            server.connect(str(self._target))
            answers = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            answers.start()
            self._pump(client, server)
            answers.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._speaks.wait()
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextmanager
def stopped_backends(server: PostgresServer, database: str) -> Iterator[None]:
    """The processes that serve a database's sessions stand still, and so does the one that would start new ones."""
    with server.connect() as connection:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = %s"
        pids = [pid for (pid,) in connection.execute(query, (database,))]
    pids.append(server.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def locked_table(server: PostgresServer, database: str, table: str) -> Iterator[None]:
    with server.connect(database) as connection:
        locked = _transaction_that_locks(connection, table)
        try:
            yield
        finally:
            locked.close()


def _transaction_that_locks(connection: psycopg.Connection[Any], tables: str) -> ExitStack:
    """Tables are locked one after another, so a server that holds one of them may be waiting for another one."""
    while True:
        with suppress(psycopg.errors.DeadlockDetected), ExitStack() as stack:
            stack.enter_context(connection.transaction())
            connection.execute(f"LOCK TABLE {tables}")  # type: ignore[arg-type]
            return stack.pop_all()
