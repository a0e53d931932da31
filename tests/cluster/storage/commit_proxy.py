"""A proxy between servers and PostgreSQL that does harm to the COMMIT of a transaction that a test has chosen."""

import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.postgres import USER, PostgresServer

COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
KEY_DATA = b"K\x00\x00\x00\x0c"
NUM_OTHERS = 4
"""Transactions of others between a crash and the next connection: they take over the numbers of those that it undid."""


class Harm(StrEnum):
    CUT_BEFORE = "the COMMIT never reaches the database"
    CUT_AFTER = "the answer to the COMMIT never reaches the server"
    LATE = "the connection breaks, and the database gets the COMMIT a moment later"
    CRASH_BEFORE = "the database crashes before it gets the COMMIT"
    CRASH_AFTER = "the database crashes after it has committed, and before the server hears of it"
    CRASH_BESIDE = "the database crashes while it commits"
    AWAY_BEFORE = "the COMMIT never reaches the database, which is away for longer than the server asks"
    AWAY_AFTER = "the database has committed, and is away for longer than the server asks"


class CommitProxy:
    """Listens on a socket of its own; as a context, until its end. ``away_s``: longer than a server asks."""

    def __init__(self, server: PostgresServer, away_s: float) -> None:
        self._server, self._away_s = server, away_s
        self.directory = Path(tempfile.mkdtemp(prefix="neaptide-cut-", dir="/tmp"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._is_open = threading.Event()
        self._is_open.set()
        self._chosen: dict[int, Harm] = {}
        """By process id of the connection's backend."""
        self.num_done = 0
        """Harms that are over."""

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.directory}"

    def __enter__(self) -> "CommitProxy":
        self._listener.bind(str(self.directory / ".s.PGSQL.5432"))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self.directory)

    def choose(self, backend_pid: int, harm: Harm) -> None:
        """The next COMMIT on this connection is done harm to."""
        self._chosen[backend_pid] = harm

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                upstream = socket.socket(socket.AF_UNIX)
                try:
                    assert self._is_open.is_set()
                    upstream.connect(str(self._server.directory / ".s.PGSQL.5432"))
                except (OSError, AssertionError):
                    upstream.close()
                    client.close()
                    continue
                _Line(client, upstream, self._do_harm).start()

    def _do_harm(self, line: "_Line") -> bool:
        """False where none was meant."""
        harm = self._chosen.pop(line.backend_pid, None)
        if harm is None:
            return False
        self._is_open.set()
        match harm:
            case Harm.CUT_AFTER:
                line.commit_unheard()
            case Harm.LATE:
                line.hang_up()
                time.sleep(0.1)
                line.commit_unheard()
            case Harm.CRASH_BEFORE:
                self._crash()
            case Harm.CRASH_AFTER:
                line.commit_unheard()
                self._crash()
            case Harm.CRASH_BESIDE:
                line.commit_unheard(wait_s=0.001)
                self._crash()
            case Harm.AWAY_BEFORE:
                self._is_open.clear()
            case Harm.AWAY_AFTER:
                self._is_open.clear()
                line.commit_unheard()
        line.close()
        if not self._is_open.is_set():
            time.sleep(self._away_s)
            self._is_open.set()
        self.num_done += 1
        return True

    def _crash(self) -> None:
        """And others come before whoever waits for the database."""
        self._is_open.clear()
        self._server.stop()
        self._server.start()
        for number in range(NUM_OTHERS):
            self._server.execute(f"CREATE TABLE IF NOT EXISTS others (n int); INSERT INTO others VALUES ({number})")
        self._is_open.set()


class _Line:
    """One connection of a server, with the one of the database that it is passed on to."""

    def __init__(self, client: socket.socket, upstream: socket.socket, on_commit: "Callable[[_Line], bool]") -> None:
        self._client, self._upstream, self._on_commit = client, upstream, on_commit
        self._is_unheard = False
        self._answered = threading.Event()
        self.backend_pid = 0

    def start(self) -> None:
        threads = [threading.Thread(target=work, daemon=True) for work in (self._pass_up, self._pass_down)]
        for thread in threads:
            thread.start()
        threading.Thread(target=self._tidy, args=(threads,), daemon=True).start()

    def _tidy(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join()
        self._client.close()
        self._upstream.close()

    def commit_unheard(self, wait_s: float = PATIENCE_S) -> None:
        """Returns when the database has answered, or after a while."""
        self._is_unheard = True
        self._upstream.sendall(COMMIT)
        self._answered.wait(wait_s)

    def hang_up(self) -> None:
        """Only on the server."""
        self._is_unheard = True
        self._client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._client, self._upstream):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_up(self) -> None:
        with suppress(OSError):
            while data := self._client.recv(65536):
                if data.endswith(COMMIT):
                    self._upstream.sendall(data.removesuffix(COMMIT))
                    if self._on_commit(self):
                        break
                    data = COMMIT
                self._upstream.sendall(data)
        self.close()

    def _pass_down(self) -> None:
        with suppress(OSError):
            while data := self._upstream.recv(65536):
                if self.backend_pid == 0 and (at := data.find(KEY_DATA)) >= 0:
                    (self.backend_pid,) = struct.unpack_from("!i", data, at + len(KEY_DATA))
                if self._is_unheard:
                    self._answered.set()
                else:
                    self._client.sendall(data)
        self._answered.set()
        if not self._is_unheard:  # else the harm is not over
            self.close()
