"""Promises that one server keeps, where a client's requests fall on two real ones, behind either address."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.cluster.e2e.machine import RunningCluster, flags_of, streaming
from tests.cluster.e2e.on_ray.machine import RayCluster, needs_ray
from tests.cluster.e2e.shared import LEASE_S, submit
from tests.e2e.conftest import KEYS, SIM
from tests.e2e.server import get_batch, result_lines, wait_terminal
from tests.patience import PATIENCE_S, until_here
from tests.postgres import PostgresServer

pytestmark = pytest.mark.full

LINE = {"model": "neaptide-tiny", "prompt": "2+2=", "max_tokens": 2}
NUM_LINES = 2_000
"""More than is done before somebody has said what is to become of them."""


@pytest.fixture(scope="module", params=["machine", pytest.param("ray", marks=needs_ray)])
def cluster(
    request: pytest.FixtureRequest, postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    settings = {"chunk_lease_s": LEASE_S, "shadow": "off", "max_num_seqs": 32}
    settings |= {"store": postgres_server.url(postgres_server.new_database())}
    if request.param == "ray":
        cluster: RunningCluster = RayCluster(directory, settings | {"api_key": list(KEYS)}, env=SIM)
    else:
        cluster = RunningCluster(
            directory, *flags_of([*settings.items(), *(("api_key", key) for key in KEYS)]), env=SIM
        )
    cluster.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
    with cluster:
        yield cluster


@pytest.fixture
def replicas(cluster: RunningCluster) -> Iterator[list[httpx.Client]]:
    """Each by its own address, so that it is known which one is asked."""
    clients = [
        httpx.Client(base_url=one["url"], headers=cluster.http.headers, timeout=PATIENCE_S) for one in cluster.shown()
    ]
    yield clients
    for client in clients:
        client.close()


def uploaded(server: httpx.Client, num_lines: int = 1) -> str:
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": LINE} for i in range(num_lines)]
    content = "\n".join(map(json.dumps, lines)).encode()
    files = {"file": ("lines.jsonl", content, "application/jsonl")}
    reply = server.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status()
    return str(reply.json()["id"])


def creation(file_id: str, **changes: Any) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **changes}


def test_one_idempotency_key_makes_one_batch_whichever_replicas_are_asked(replicas: list[httpx.Client]) -> None:
    body = creation(uploaded(replicas[0]))
    headers = {"Idempotency-Key": "one"}

    def create(number: int) -> str:
        reply = replicas[number % 2].post("/v1/batches", json=body, headers=headers)
        return str(reply.raise_for_status().json()["id"])

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(create, range(8)))
    assert len(made) == 1
    for replica in replicas:
        other = replica.post("/v1/batches", json=body | {"metadata": {"another": "body"}}, headers=headers)
        assert (other.status_code, other.headers["x-should-retry"]) == (409, "false")
        listed = replica.get("/v1/batches", params={"limit": 100}).json()["data"]
        assert [one["id"] for one in listed if one["input_file_id"] == body["input_file_id"]] == list(made)


def test_another_keys_things_exist_on_no_replica(cluster: RunningCluster, replicas: list[httpx.Client]) -> None:
    file_id = uploaded(replicas[0])
    batch_id = replicas[0].post("/v1/batches", json=creation(file_id)).raise_for_status().json()["id"]
    wait_terminal(cluster, batch_id)
    stranger = {"Authorization": f"Bearer {KEYS[1]}"}
    paths = (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}")
    for server in (cluster.http, *replicas):
        assert [server.get(path).status_code for path in paths] == [200] * 3
        assert [server.get(path, headers=stranger).status_code for path in paths] == [404] * 3
        assert server.post(f"/v1/batches/{batch_id}/cancel", headers=stranger).status_code == 404
        assert server.get("/v1/files", headers=stranger).json()["data"] == []
        assert server.get("/v1/batches", headers=stranger).json()["data"] == []
        assert server.get(paths[0], headers={"Authorization": "Bearer nobody"}).status_code == 401


def test_what_one_replica_took_another_one_ends_as_was_asked(
    cluster: RunningCluster, replicas: list[httpx.Client]
) -> None:
    batch_id = submit(cluster, NUM_LINES, 24)
    file_id = get_batch(cluster, batch_id)["input_file_id"]
    until_here(lambda: get_batch(cluster, batch_id)["request_counts"]["completed"] > 0)
    for replica in replicas:
        assert replica.delete(f"/v1/files/{file_id}").status_code == 409
    replicas[1].post(f"/v1/batches/{batch_id}/cancel").raise_for_status()
    assert replicas[0].get(f"/v1/batches/{batch_id}").json()["status"] in ("cancelling", "cancelled")
    done = wait_terminal(cluster, batch_id)
    counts = done["request_counts"]
    assert (done["status"], counts["failed"], counts["total"]) == ("cancelled", 0, NUM_LINES)
    assert 0 < counts["completed"] < NUM_LINES
    lines = result_lines(cluster, done)
    assert sorted(line["custom_id"] for line in lines) == sorted(f"c{i}" for i in range(NUM_LINES))
    assert sum(line["error"] is None for line in lines) == counts["completed"]
    assert replicas[0].delete(f"/v1/files/{file_id}").json()["deleted"]
    assert replicas[1].get(f"/v1/files/{file_id}").status_code == 404


def test_a_part_of_a_file_comes_from_either_and_through_the_gateway(
    cluster: RunningCluster, replicas: list[httpx.Client]
) -> None:
    file_id = uploaded(replicas[1], num_lines=3)
    whole = replicas[1].get(f"/v1/files/{file_id}/content").content
    for server in (cluster.http, *replicas):
        part = server.get(f"/v1/files/{file_id}/content", headers={"Range": "bytes=5-20"})
        assert (part.status_code, part.content) == (206, whole[5:21])
        assert part.headers["content-range"] == f"bytes 5-20/{len(whole)}"


def test_a_client_that_leaves_the_gateway_leaves_nothing_on_the_replica(cluster: RunningCluster) -> None:
    aborted = re.compile(r'neaptide_requests_total\{.*outcome="aborted".*\} [1-9]')
    with streaming(cluster, max_tokens=7_000) as stream:
        stream.read(2)
        assert not aborted.search(cluster.http.get("/metrics").text)
        log = cluster.request_log(stream.replica)
        begun = [event["id"] for event in log if event["event"] == "start"][-1]
    # In the middle of 7,000 steps.
    ended = {"event": "end", "id": begun}.items()
    until_here(lambda: any(ended <= event.items() for event in cluster.request_log(stream.replica)))
    until_here(lambda: [one["requests"] for one in cluster.shown()] == [0, 0])
    until_here(lambda: aborted.search(cluster.http.get("/metrics").text))


def test_errors_and_request_ids_are_those_of_a_server(cluster: RunningCluster) -> None:
    own = {"X-Request-Id": "mine-1"}
    refused = cluster.http.post("/v1/completions", json=LINE | {"max_tokens": -1}, headers=own)
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine-1")
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "max_tokens")
    # 60 KB of headers pass as well.
    wide = {f"X-Wide-{i}": "x" * 6_000 for i in range(10)}
    assert cluster.http.post("/v1/completions", json=LINE, headers=wide).status_code == 200
