"""The same on Ray Serve: two replicas as actors, behind its proxy. Runs where Ray is installed (make test-cluster)."""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from tests.e2e.cluster.machine import RunningCluster, streaming
from tests.e2e.cluster.shared import LEASE_S
from tests.e2e.conftest import SIM
from tests.e2e.server import result_lines, submit_batch, wait_terminal
from tests.postgres import PostgresServer

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed (pip install neaptide[cluster])"),
]
MANIFEST = Path(__file__).parents[3] / "deploy" / "ray" / "serve.yaml"
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Sockets below it must have short names.
    "RAY_TMPDIR": "/tmp",
    # On a machine that others use its processes may take minutes to come up: longer than it waits for them by default.
    "RAY_agent_register_timeout_ms": "280000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "280",
}
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}


def local_manifest(port: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """``deploy/ray/serve.yaml`` for a machine of any size, with a simulated engine."""
    manifest: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    manifest["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = manifest["applications"]
    application["args"] = application["args"] | arguments
    for deployment in application["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0}
    return manifest


class RayCluster(RunningCluster):
    """A Ray of its own, which ends with the context."""

    def __init__(self, directory: Path, arguments: dict[str, Any]) -> None:
        super().__init__(directory, env=SIM)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "serve.yaml"
        arguments = arguments | {"data_dir": str(self.data_dir)}
        path.write_text(yaml.safe_dump(local_manifest(self.port, arguments)))
        self._command = [sys.executable, str(Path(__file__).with_name("small_ray.py")), str(path)]
        self._env |= RAY_VARIABLES

    def replica(self, name: str) -> psutil.Process:
        port = next(one["url"] for one in self.shown() if one["name"] == name).rpartition(":")[2]
        for process in psutil.process_iter():
            try:
                if any(str(one.laddr.port) == port for one in process.net_connections("tcp") if one.status == "LISTEN"):
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"no process listens for {name}")

    def __exit__(self, *exc: Any) -> None:
        # Ctrl-C is what ends ``serve run`` in good order.
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGINT)
        super().__exit__(*exc)


@pytest.fixture(scope="module")
def cluster(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    directory = tmp_path_factory.mktemp("ray")
    arguments = {
        "store": postgres_server.url(postgres_server.new_database()),
        "blobs": (directory / "blobs").as_uri(),
        "chunk_lease_s": LEASE_S,
        "shadow": "off",
        "allowed_hosts": ["*"],
    }
    with RayCluster(directory, arguments) as cluster:
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
