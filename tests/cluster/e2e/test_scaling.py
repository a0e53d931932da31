"""A live fleet grows for a batch that would be late, and shrinks when less was enough for long: no line is lost."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.e2e.machine import RunningCluster
from tests.cluster.e2e.on_ray.machine import MANIFEST, RayCluster, needs_ray
from tests.cluster.e2e.shared import LEASE_S, durable_results, submit
from tests.e2e.conftest import SIM
from tests.e2e.server import get_batch, result_lines, wait_terminal
from tests.postgres import PostgresServer

ENV = SIM | {"NEAPTIDE_SIM_STEP_MS": "50"}
FLAGS = ("--chunk-lease-s", str(LEASE_S), "--shadow", "off", "--max-num-seqs", "8", "--profile", "cpu-111m")
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}
NUM_URGENT = 2_000


@pytest.mark.full
def test_a_fleet_grows_for_a_deadline_and_shrinks_without_losing_a_line(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    database = postgres_server.new_database()
    flags = ("--store", postgres_server.url(database), "--completion-windows", "24h,20s", *FLAGS)
    with RunningCluster(tmp_path, *flags, env=ENV, replicas="1:2") as cluster:
        check_growth_and_decline(cluster, postgres_server, database, num_lax=1_600, window="20s")


@needs_ray
@pytest.mark.full
def test_on_ray_it_does_by_our_policy(postgres_server: PostgresServer, tmp_path: Path) -> None:
    database = postgres_server.new_database()
    arguments = {
        "store": postgres_server.url(database),
        "completion_windows": ["24h", "60s"],
        "chunk_lease_s": LEASE_S,
        "shadow": "off",
        "max_num_seqs": 8,
        "profile": "cpu-111m",
        "allowed_hosts": ["*"],
    }
    scaling: dict[str, Any] = yaml.safe_load(MANIFEST.with_name("autoscaling.yaml").read_text())
    # Serve hears of deadlines every ten seconds.
    scaling |= {"max_replicas": 2, "downscale_delay_s": 5}
    with RayCluster(tmp_path, arguments, ENV, scaling) as cluster:
        check_growth_and_decline(cluster, postgres_server, database, num_lax=1_000, window="60s")


def check_growth_and_decline(
    cluster: RunningCluster, postgres: PostgresServer, database: str, num_lax: int, window: str
) -> None:
    """From one replica to two and back."""
    lax = submit(cluster, num_lax, 24)
    # Minutes of work in one.
    urgent = submit(cluster, NUM_URGENT, 64, window=window)

    def after_a_chat() -> list[str]:
        """How the replicas are; a chat is answered at any time."""
        reply = cluster.http.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, f"{reply.text}\n{cluster.log[-3000:]}"
        return [one["state"] for one in cluster.shown()]

    cluster.wait_for(lambda: after_a_chat() == ["ready", "ready"])
    wait_terminal(cluster, urgent)
    # Chats and a lax batch are one replica's work. The other one drains when that was so for long.
    cluster.wait_for(lambda: after_a_chat() == ["ready"])
    durable = durable_results(postgres, database, lax)
    assert 0 < len(durable) < num_lax
    wait_terminal(cluster, lax)
    done = get_batch(cluster, lax)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", num_lax)
    assert [line["custom_id"] for line in result_lines(cluster, done)] == [f"c{i}" for i in range(num_lax)]
    results = durable_results(postgres, database, lax)
    assert {custom_id: results[custom_id] for custom_id in durable} == durable
