"""Six clients upload to two servers while backends of their database are killed: nothing acknowledged is lost."""

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.cluster.e2e.shared import SharedServers
from tests.e2e.server import RunningServer
from tests.patience import PATIENCE_S
from tests.postgres import PostgresServer

NUM_CLIENTS = 6
NUM_KILLS, BETWEEN_KILLS_S = 60, 3.0


@dataclass
class Client:
    """Uploads one file after another, to either server, each until it is acknowledged."""

    number: int
    servers: list[RunningServer]
    is_over: threading.Event
    acknowledged: dict[str, bytes] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)

    def run(self) -> None:
        servers = itertools.cycle(self.servers[self.number % 2 :] + self.servers[: self.number % 2])
        for count in itertools.count():
            if self.is_over.is_set():
                return
            self.upload(next(servers), f"{self.number}-{count}")

    def upload(self, server: RunningServer, name: str) -> None:
        content = f"of client {name}\n".encode()
        while True:
            reply = httpx.post(
                f"{server.base_url}/files",
                data={"purpose": "batch"},
                files={"file": (f"{name}.jsonl", content)},
                headers={"Idempotency-Key": name},
                timeout=PATIENCE_S,
            )
            self.statuses[reply.status_code] += 1
            if reply.status_code == 200:
                assert self.acknowledged.setdefault(reply.json()["id"], content) == content
                return
            if reply.status_code != 503:
                self.is_over.set()
                return
            time.sleep(0.1)


def kill_one(postgres: PostgresServer, database: str, chosen: random.Random) -> bool:
    """A backend of a server, at any moment; the database throws everybody out and recovers."""
    query = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND application_name = 'neaptide' ORDER BY pid"
    with suppress(psycopg.OperationalError, ProcessLookupError), postgres.connect() as connection:
        pids = [pid for (pid,) in connection.execute(query, (database,))]
        if pids:
            os.kill(chosen.choice(pids), signal.SIGKILL)
            return True
    return False


@pytest.mark.full
@pytest.mark.timeout(3_000)
def test_no_upload_is_lost_while_backends_are_killed(postgres_server: PostgresServer, tmp_path: Path) -> None:
    is_over, chosen, num_kills = threading.Event(), random.Random(1), 0
    with SharedServers(tmp_path, postgres_server) as shared:
        clients = [Client(number, shared.servers, is_over) for number in range(NUM_CLIENTS)]
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        while num_kills < NUM_KILLS and not is_over.wait(BETWEEN_KILLS_S * chosen.uniform(0.7, 1.3)):
            num_kills += kill_one(postgres_server, shared.database, chosen)
        is_over.set()
        for thread in threads:
            thread.join()
        statuses = sum((client.statuses for client in clients), Counter())
        assert set(statuses) <= {200, 503}, statuses
        acknowledged = {key: value for client in clients for key, value in client.acknowledged.items()}
        assert len(acknowledged) == statuses[200]
        lost = [
            file_id
            for (file_id, content), server in zip(acknowledged.items(), itertools.cycle(shared.servers), strict=False)
            if server.http.get(f"/v1/files/{file_id}/content").content != content
        ]
        assert lost == []
        listed = {file["id"] for file in listing(shared.servers[0])}
        assert listed == set(acknowledged), "each of them once"
    print(json.dumps({"acknowledged": len(acknowledged), "kills": num_kills, "statuses": dict(statuses)}))
    assert num_kills == NUM_KILLS


def listing(server: RunningServer) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    after: dict[str, str] = {}
    while True:
        page = server.http.get("/v1/files", params={"limit": "1000", **after}).raise_for_status().json()
        found += page["data"]
        if not page["has_more"]:
            return found
        after = {"after": found[-1]["id"]}
