"""Real servers that share one database and one place for blobs, each with a data directory of its own."""

import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer, submit_batch
from tests.kills import signal_all
from tests.postgres import PostgresServer

LEASE_S = 2


class SharedServers:
    """``servers`` on one new database; started one after another. Their blobs lie in a directory, if ``blobs`` names no
    other place."""

    def __init__(
        self,
        root: Path,
        postgres: PostgresServer,
        count: int = 2,
        step_ms: int = 10,
        flags: Sequence[str] = (),
        blobs: str | None = None,
    ) -> None:
        self._postgres = postgres
        self.database = postgres.new_database()
        flags = [*flags, "--store", postgres.url(self.database), "--blobs", blobs or f"file://{root}/blobs"]
        flags += ["--chunk-lease-s", str(LEASE_S), "--shadow", "off", "--max-num-seqs", "32"]
        env = SIM | {"NEAPTIDE_SIM_STEP_MS": str(step_ms)}
        self.servers = [RunningServer(root / f"server-{number}", *flags, env=env) for number in range(count)]

    def __enter__(self) -> "SharedServers":
        for number, server in enumerate(self.servers):
            try:
                server.__enter__()
            except BaseException:
                for started in self.servers[:number]:
                    started.__exit__(None, None, None)
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.servers:
            server.__exit__(None, None, None)

    def holders(self, batch_id: str) -> Counter[str]:
        """Chunks of a batch by the server that leased them last."""
        query = "SELECT holder FROM batch_chunks WHERE batch_id = %s AND holder IS NOT NULL AND leased_until_ms > 0"
        with self._postgres.connect(self.database) as connection:
            return Counter(row[0] for row in connection.execute(query, (batch_id,)))

    def epochs(self, batch_id: str) -> int:
        """How often chunks that are not done have been leased, at most."""
        query = "SELECT coalesce(max(epoch), 0) FROM batch_chunks WHERE batch_id = %s"
        with self._postgres.connect(self.database) as connection:
            row = connection.execute(query, (batch_id,)).fetchone()
            assert row is not None
            return int(row[0])

    def num_done(self, batch_id: str) -> int:
        """Completed lines of a batch, by whichever server."""
        with self._postgres.connect(self.database) as connection:
            row = connection.execute("SELECT num_completed FROM batches WHERE id = %s", (batch_id,)).fetchone()
            assert row is not None
            return int(row[0])

    def results(self, batch_id: str) -> dict[str, str]:
        """Request id of each durable result, by custom_id."""
        return durable_results(self._postgres, self.database, batch_id)


def durable_results(postgres: PostgresServer, database: str, batch_id: str) -> dict[str, str]:
    """Request id of each result of a batch, by custom_id."""
    query = "SELECT custom_id, request_id FROM batch_lines WHERE batch_id = %s AND state = 'completed'"
    with postgres.connect(database) as connection:
        return dict(connection.execute(query, (batch_id,)).fetchall())


def tree_of(server: RunningServer) -> list[psutil.Process]:
    """A server's process and its children."""
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def freeze(server: RunningServer) -> list[psutil.Process]:
    """Stops every process of a server where it stands; returns them."""
    processes = tree_of(server)
    signal_all(processes, signal.SIGSTOP)
    return processes


def wake(processes: list[psutil.Process]) -> None:
    signal_all(processes, signal.SIGCONT)


def submit(server: RunningServer, num_lines: int, max_tokens: int, window: str = "24h") -> str:
    body = {"model": "neaptide-tiny", "prompt": "2+2=", "max_tokens": max_tokens, "ignore_eos": True}
    return submit_batch(server, [body] * num_lines, "/v1/completions", window)


def state(server: RunningServer, batch_id: str) -> tuple[str, int]:
    """Status of a batch and its completed lines; blank while the database is away."""
    reply = server.http.get(f"/v1/batches/{batch_id}")
    if reply.status_code == 503:
        return "", 0
    batch: dict[str, Any] = reply.raise_for_status().json()
    return str(batch["status"]), int(batch["request_counts"]["completed"])


def completed(server: RunningServer, batch_id: str) -> int:
    return state(server, batch_id)[1]
