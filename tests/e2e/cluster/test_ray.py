"""The same on Ray Serve: two replicas as actors, behind its proxy. Runs where Ray is installed (make test-cluster)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.cluster.machine import streaming
from tests.e2e.cluster.ray_machine import RayCluster, needs_ray
from tests.e2e.cluster.shared import LEASE_S
from tests.e2e.conftest import SIM
from tests.e2e.server import result_lines, submit_batch, wait_terminal
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.full, needs_ray]
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}


@pytest.fixture(scope="module")
def cluster(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    directory = tmp_path_factory.mktemp("ray")
    arguments = {
        "store": postgres_server.url(postgres_server.new_database()),
        "chunk_lease_s": LEASE_S,
        "shadow": "off",
        "allowed_hosts": ["*"],
    }
    with RayCluster(directory, arguments, env=SIM) as cluster:
        yield cluster


def test_a_batch_and_chats_by_the_real_client(cluster: RayCluster) -> None:
    body = {"model": "neaptide-tiny", "prompt": "2+2=", "max_tokens": 4, "ignore_eos": True}
    with openai.OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:
        batch_id = submit_batch(cluster, [body] * 100, "/v1/completions")
        online = client.completions.create(model="neaptide-tiny", prompt="2+2=", max_tokens=4)
        done = wait_terminal(cluster, batch_id)
        assert client.batches.retrieve(batch_id).status == "completed"
    lines = result_lines(cluster, done)
    assert [line["custom_id"] for line in lines] == [f"c{i}" for i in range(100)]
    assert {line["response"]["body"]["choices"][0]["text"] for line in lines} == {online.choices[0].text}


def test_events_come_while_the_answer_is_being_made(cluster: RayCluster) -> None:
    with streaming(cluster) as stream:
        stream.read(4)
        logs = [event for path in cluster.data_dir.glob("*/engine-requests.jsonl") for event in events_of(path)]
    started = {event["id"] for event in logs if event["event"] == "start"}
    assert started - {event["id"] for event in logs if event["event"] == "end"}


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_replica_that_is_killed_is_replaced_and_chats_go_on(cluster: RayCluster) -> None:
    victim = cluster.shown()[0]
    cluster.kill(victim["name"])
    for _ in range(20):
        reply = cluster.http.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, reply.text
    cluster.wait_for(lambda: victim["url"] not in {one["url"] for one in cluster.shown()})
    cluster.wait_all_ready()
