"""Twenty kills and freezes of two servers, and two restarts of their database, amid 5,000 lines and chats."""

import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.cluster.e2e.shared import LEASE_S, SharedServers, completed, freeze, state, submit, wake
from tests.e2e.server import RunningServer, get_batch, result_lines
from tests.patience import PATIENCE_S
from tests.postgres import PostgresServer

NUM_LINES = 5_000
NUM_BLOWS = 20
NUM_DATABASE_RESTARTS = 2
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 8}


class Chats:
    """Chats with every server in turn, from a thread. A failure counts unless the test was hurting that server."""

    def __init__(self, servers: list[RunningServer]) -> None:
        self._servers = servers
        self._hurt = [0] * len(servers)
        """Odd while a server is being hurt."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_answered = 0
        self.failures: list[str] = []

    def __enter__(self) -> "Chats":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def hurting(self, number: int, is_hurt: bool) -> None:
        self._hurt[number] += 1
        assert self._hurt[number] % 2 == is_hurt

    def _run(self) -> None:
        while not self._is_over.wait(0.1):
            for number, server in enumerate(self._servers):
                before = self._hurt[number]
                if before % 2 == 0 and not self._is_answered(server) and self._hurt[number] == before:
                    self.failures.append(f"server {number}")

    def _is_answered(self, server: RunningServer) -> bool:
        try:
            reply = httpx.post(f"{server.base_url}/chat/completions", json=CHAT, timeout=PATIENCE_S)
        except httpx.TransportError:
            return False
        self.num_answered += reply.status_code == 200
        return reply.status_code == 200


class Witness:
    """That no engine begins a line whose result was durable before: told at moments, asked at the end."""

    def __init__(self, shared: SharedServers, batch_id: str) -> None:
        self._shared = shared
        self._batch_id = batch_id
        self._moments: list[tuple[set[str], list[int]]] = []

    def look(self) -> None:
        # The results first: what was begun for them stands in the logs by then.
        finished = set(self._shared.results(self._batch_id))
        self._moments.append((finished, [len(server.request_log()) for server in self._shared.servers]))

    def run_again(self) -> set[str]:
        """Without chunks that a server lost while it was frozen: it may begin some of their lines before it notices,
        and nothing comes of that."""
        again: set[str] = set()
        for number, server in enumerate(self._shared.servers):
            log, lost = server.request_log(), lost_leases(server)
            for finished, lengths in self._moments:
                for event in log[lengths[number] :]:
                    job_id, _, row = event["id"].rpartition(":")
                    if event["event"] == "start" and job_id.startswith(self._batch_id) and job_id not in lost:
                        again |= {f"c{row}"} & finished
        return again


def lost_leases(server: RunningServer) -> set[str]:
    """Names of the chunks that others have taken over from the server."""
    return set(re.findall(r"batch (batch_\w+\.\d+\.\d+): a lease is lost", server.log))


def check_every_line_is_there_once(shared: SharedServers, batch_id: str) -> None:
    for server in shared.servers:
        done = get_batch(server, batch_id)
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LINES)
        lines = result_lines(server, done)
        assert [line["custom_id"] for line in lines] == [f"c{i}" for i in range(NUM_LINES)]
        durable = shared.results(batch_id)
        assert {line["custom_id"]: line["response"]["request_id"] for line in lines} == durable


@pytest.mark.full
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("seed", [1])
def test_every_line_ends_once(postgres_server: PostgresServer, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    kinds = (
        ["kill"] * (NUM_BLOWS // 2) + ["freeze"] * (NUM_BLOWS - NUM_BLOWS // 2) + ["database"] * NUM_DATABASE_RESTARTS
    )
    random.shuffle(kinds)
    told: Counter[str] = Counter()
    with SharedServers(tmp_path, postgres_server, step_ms=120) as shared:
        first = shared.servers[0]
        batch_id = submit(first, NUM_LINES, 24)
        first.wait_for(lambda: state(first, batch_id)[0] == "in_progress")
        witness = Witness(shared, batch_id)
        with Chats(shared.servers) as chats:
            for done, kind in enumerate(kinds):
                number = random.randrange(2)
                victim, other = shared.servers[number], shared.servers[1 - number]
                due = NUM_LINES * (done + 1) // (len(kinds) + 2)
                other.wait_for(lambda due=due, other=other: completed(other, batch_id) >= due)
                told[kind] += state(other, batch_id)[0] != "completed"
                if kind == "database":
                    postgres_server.stop()
                    postgres_server.start()
                    witness.look()
                    continue
                chats.hurting(number, True)
                if kind == "kill":
                    victim.kill_both()
                    witness.look()
                    victim.start()
                else:
                    frozen = freeze(victim)
                    time.sleep(LEASE_S * random.uniform(1.2, 2.0))
                    wake(frozen)
                    victim.wait_ready()
                chats.hurting(number, False)
            first.wait_for(lambda: state(first, batch_id)[0] == "completed")
        check_every_line_is_there_once(shared, batch_id)
        assert chats.failures == []
        assert chats.num_answered > 0
        assert witness.run_again() == set()
        lost = sum(len(lost_leases(server)) for server in shared.servers)
        assert told == Counter(kinds), "the batch ended before its trials"
        print(json.dumps({"chats": chats.num_answered, "blows": dict(told), "claims_lost": lost}))
