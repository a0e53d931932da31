"""A live fleet grows for a batch that would be late, and shrinks when less was enough for long: no line is lost."""

from pathlib import Path

import pytest

from tests.e2e.cluster.machine import RunningCluster
from tests.e2e.cluster.shared import LEASE_S, durable_results, submit
from tests.e2e.conftest import SIM
from tests.e2e.server import get_batch, result_lines, wait_terminal
from tests.postgres import PostgresServer

FLAGS = ("--chunk-lease-s", str(LEASE_S), "--shadow", "off", "--max-num-seqs", "8", "--profile", "cpu-111m")
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}
NUM_URGENT, NUM_LAX = 2_000, 1_600


@pytest.mark.full
def test_a_fleet_grows_for_a_deadline_and_shrinks_without_losing_a_line(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    database = postgres_server.new_database()
    flags = ("--store", postgres_server.url(database), "--completion-windows", "24h,20s", *FLAGS)
    env = SIM | {"NEAPTIDE_SIM_STEP_MS": "50"}
    with RunningCluster(tmp_path, *flags, env=env, replicas="1:2") as cluster:
        lax = submit(cluster, NUM_LAX, 24)
        # Minutes of work in 20 s.
        urgent = submit(cluster, NUM_URGENT, 64, window="20s")

        def after_a_chat() -> list[str]:
            """How the replicas are; a chat is answered at any time."""
            reply = cluster.http.post("/v1/chat/completions", json=CHAT)
            assert reply.status_code == 200, f"{reply.text}\n{cluster.log[-3000:]}"
            return [one["state"] for one in cluster.shown()]

        cluster.wait_for(lambda: after_a_chat() == ["ready", "ready"])
        wait_terminal(cluster, urgent)
        # Chats and a lax batch are one replica's work. The other one drains when that was so for a minute.
        cluster.wait_for(lambda: after_a_chat() == ["ready"])
        durable = durable_results(postgres_server, database, lax)
        assert 0 < len(durable) < NUM_LAX
        wait_terminal(cluster, lax)
        done = get_batch(cluster, lax)
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LAX)
        assert [line["custom_id"] for line in result_lines(cluster, done)] == [f"c{i}" for i in range(NUM_LAX)]
        results = durable_results(postgres_server, database, lax)
        assert {custom_id: results[custom_id] for custom_id in durable} == durable
