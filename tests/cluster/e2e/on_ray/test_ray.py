"""The same on Ray Serve: two replicas as actors, behind its proxy. Runs where Ray is installed (make test-cluster)."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.e2e.machine import on_both, streaming
from tests.cluster.e2e.on_ray.machine import RayCluster, needs_ray
from tests.cluster.e2e.shared import LEASE_S, submit
from tests.e2e.conftest import SIM
from tests.e2e.server import result_lines, submit_batch, wait_terminal
from tests.postgres import PostgresServer

pytestmark = [pytest.mark.full, needs_ray]
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}
NUM_LINES = 300
NUM_STREAMED = 4_000
"""Tokens of 40 s: longer than it takes Serve to begin an update."""


@pytest.fixture(scope="module")
def cluster(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    directory = tmp_path_factory.mktemp("ray")
    arguments = {
        "store": postgres_server.url(postgres_server.new_database()),
        "chunk_lease_s": LEASE_S,
        "shadow": "off",
        "allowed_hosts": ["*"],
        "drain_timeout_s": 300,
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


def test_what_is_deployed_anew_replaces_them_one_by_one_and_nobody_notices(cluster: RayCluster) -> None:
    batch_id = submit(cluster, NUM_LINES, 24)
    with ExitStack() as stack:
        streams = on_both(stack, cluster, max_tokens=NUM_STREAMED)
        before = {one["url"] for one in cluster.shown()}
        num_least = cluster.num_replicas
        cluster.deploy(max_num_seqs=16)

        def are_others() -> bool:
            """Every chat is answered meanwhile, whichever replica or gateway stops."""
            nonlocal num_least
            reply = cluster.http.post("/v1/chat/completions", json=CHAT)
            assert reply.status_code == 200, f"{reply.text}\n{cluster.log[-3000:]}"
            ready = [one["url"] for one in cluster.shown() if one["state"] == "ready"]
            num_least = min(num_least, len(ready))
            return len(ready) == cluster.num_replicas and not before & set(ready)

        cluster.wait_for(are_others)
        assert num_least == 1
        for stream in streams.values():
            last, end = stream.rest()[-2:]
            assert (json.loads(last)["choices"][0]["finish_reason"], end) == ("length", "[DONE]")
    done = wait_terminal(cluster, batch_id)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LINES)
    assert [line["custom_id"] for line in result_lines(cluster, done)] == [f"c{i}" for i in range(NUM_LINES)]
