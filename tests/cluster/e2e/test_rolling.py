"""Two real replicas that are replaced one by one amid streams, chats and a batch: nobody notices."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.e2e.machine import RunningCluster, on_both
from tests.cluster.e2e.shared import LEASE_S, durable_results, submit
from tests.e2e.conftest import SIM
from tests.e2e.server import get_batch, result_lines, wait_terminal
from tests.postgres import PostgresServer

FLAGS = ("--chunk-lease-s", str(LEASE_S), "--shadow", "off", "--max-num-seqs", "32", "--drain-timeout-s", "300")
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}
NUM_LINES = 600


@pytest.fixture
def database(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture
def cluster(postgres_server: PostgresServer, database: str, tmp_path: Path) -> Iterator[RunningCluster]:
    with RunningCluster(tmp_path, "--store", postgres_server.url(database), *FLAGS, env=SIM) as cluster:
        yield cluster


def lives(cluster: RunningCluster) -> dict[str, str]:
    """Where each replica listens: another life listens elsewhere."""
    return {one["name"]: one["url"] for one in cluster.shown()}


@pytest.mark.full
def test_replicas_are_replaced_one_by_one_and_nobody_notices(
    cluster: RunningCluster, postgres_server: PostgresServer, database: str
) -> None:
    batch_id = submit(cluster, NUM_LINES, 24)
    with ExitStack() as stack:
        streams = on_both(stack, cluster, max_tokens=300)
        cluster.wait_for(lambda: durable_results(postgres_server, database, batch_id))
        before = lives(cluster)
        executed = {name: len(cluster.request_log(name)) for name in before}
        durable = durable_results(postgres_server, database, batch_id)
        cluster.roll()
        num_least = cluster.num_replicas
        # Every chat is answered, whichever replica drains.
        while "all replicas have been replaced" not in cluster.log:
            reply = cluster.http.post("/v1/chat/completions", json=CHAT)
            assert reply.status_code == 200, f"{reply.text}\n{cluster.log[-3000:]}"
            num_least = min(num_least, sum(one["state"] == "ready" for one in cluster.shown()))
        assert num_least == 1
        for stream in streams.values():
            last, end = stream.rest()[-2:]
            assert (json.loads(last)["choices"][0]["finish_reason"], end) == ("length", "[DONE]")
    assert [one["state"] for one in cluster.shown()] == ["ready", "ready"]
    assert all(url != before[name] for name, url in lives(cluster).items())
    wait_terminal(cluster, batch_id)
    done = get_batch(cluster, batch_id)
    assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LINES)
    assert [line["custom_id"] for line in result_lines(cluster, done)] == [f"c{i}" for i in range(NUM_LINES)]
    # What was durable has not been run again, and stands as it was.
    started = {
        f"c{event['id'].rpartition(':')[2]}"
        for name, count in executed.items()
        for event in cluster.request_log(name)[count:]
        if event["event"] == "start" and event["id"].startswith(batch_id)
    }
    assert started
    assert not started & durable.keys()
    results = durable_results(postgres_server, database, batch_id)
    assert {custom_id: results[custom_id] for custom_id in durable} == durable
