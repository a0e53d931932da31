"""The chart's pods, played over real processes: kills of the engine, a stop under new connections, a rolling update.

Not played, because there is no cluster: scheduling, the network and its endpoints, volumes, users, limits, and the
operators that read the chart's custom resources.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.deploy.chart.kubelet import Pod, get
from tests.e2e.server import free_port
from tests.patience import PATIENCE_S, until_here
from tests.postgres import PostgresServer

pytest.importorskip("helm_python", reason="needs helm-python-sdk")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ONE = {"config": {"executor": "sim", "shadow": "off"}}
TWO = {
    **ONE,
    "servers": 2,
    "gateway": {"enabled": True},
    "store": {"existingSecret": "store", "blobs": "s3://neaptide/blobs"},
}
KILLS = 10
CHAT = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "2+2="}], "max_tokens": 2}
STREAM = {**CHAT, "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def manifests() -> list[dict[str, Any]]:
    """Pod specifications by component, of one server and of two."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.chart.render"],
        input=json.dumps([ONE, TWO]),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    found = []
    for answer in json.loads(done.stdout)["answers"]:
        texts = [text for path, text in answer["manifests"].items() if path.endswith(".yaml")]
        documents = [one for text in texts for one in yaml.safe_load_all(text)]
        workloads = [one for one in documents if isinstance(one, dict) and "template" in one.get("spec", {})]
        found.append({one["kind"]: one["spec"]["template"]["spec"] for one in workloads})
    return found


@pytest.fixture
def server(manifests: list[dict[str, Any]], tmp_path: Path) -> Iterator[Pod]:
    own = {"NEAPTIDE_DATA_DIR": str(tmp_path / "data")}
    with Pod(manifests[0]["StatefulSet"], tmp_path, free_port(), own) as pod:
        yield pod


def engine_of(pod: Pod) -> psutil.Process | None:
    for child in psutil.Process(pod.process.pid).children():
        try:
            if "neaptide.launch.serve" in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def test_ten_kills_of_the_engine_fail_no_liveness_probe(server: Pod) -> None:
    for _ in range(KILLS):
        engine = engine_of(server)
        assert engine is not None
        engine.kill()
        until_here(lambda engine=engine: (now := engine_of(server)) is not None and now.pid != engine.pid)
        until_here(lambda: server.ask("readinessProbe") == 200)
    assert server.log.count("the engine ended") == KILLS
    assert set(server.liveness) == {200}
    assert server.num_restarts == 0
    assert len(server.liveness) > KILLS


def test_no_connection_is_refused_for_the_drains_minimum(server: Pod) -> None:
    statuses: list[tuple[float, int]] = []
    over = threading.Event()

    def connect_on() -> None:
        while not over.is_set():
            begun_s = time.monotonic()
            statuses.append((begun_s, get("127.0.0.1", server.port, "/v1/models", PATIENCE_S)))

    client = threading.Thread(target=connect_on)
    client.start()
    try:
        until_here(lambda: len(statuses) > 10)
        begun_s = time.monotonic()
        signal_s = server.stop()
    finally:
        over.set()
        client.join()
    min_s = 5.0
    """The chart's own."""
    during = [status for at_s, status in statuses if begun_s <= at_s < signal_s + min_s]
    assert len(during) > 10
    assert 0 not in during
    # Until the signal it works as ever: Kubernetes still sends.
    assert {status for at_s, status in statuses if at_s < signal_s - 0.5} == {200}
    assert server.process.returncode == 0


@contextmanager
def asking(ask: Callable[[], None]) -> Iterator[None]:
    """Asks again and again while the block runs."""
    over = threading.Event()
    failures: list[BaseException] = []

    def ask_on() -> None:
        try:
            while not over.is_set():
                ask()
        except BaseException as error:
            failures.append(error)
            raise

    client = threading.Thread(target=ask_on)
    client.start()
    try:
        yield
    finally:
        over.set()
        client.join()
    assert failures == []


def test_a_rolling_update_of_two_servers_costs_no_client_an_error(
    manifests: list[dict[str, Any]], postgres_server: PostgresServer, tmp_path: Path
) -> None:
    store = postgres_server.url(postgres_server.new_database())
    shared = {"NEAPTIDE_STORE": store, "NEAPTIDE_BLOBS": (tmp_path / "blobs").as_uri()}
    servers = [
        Pod(
            manifests[1]["StatefulSet"],
            tmp_path / f"server-{number}",
            free_port(),
            {**shared, "NEAPTIDE_DATA_DIR": str(tmp_path / f"server-{number}" / "data")},
        )
        for number in range(2)
    ]
    addresses = ",".join(f"http://127.0.0.1:{pod.port}" for pod in servers)
    spec = json.loads(json.dumps(manifests[1]["Deployment"]))
    (container,) = spec["containers"]
    # There is no name server: the addresses are given.
    where = container["args"].index("--servers-dns")
    container["args"][where : where + 2] = ["--servers", addresses]
    codes: list[int] = []
    ends: list[str] = []
    with servers[0], servers[1], Pod(spec, tmp_path / "gateway", free_port(), {}) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        seen: set[str] = set()

        def chat() -> None:
            reply = httpx.post(url, json=CHAT, timeout=PATIENCE_S)
            codes.append(reply.status_code)
            seen.add(reply.headers.get("x-neaptide-replica", ""))

        def stream() -> None:
            with httpx.stream("POST", url, json=STREAM, timeout=PATIENCE_S) as reply:
                codes.append(reply.status_code)
                ends.append([line for line in reply.iter_lines() if line][-1])

        with asking(chat), asking(stream):
            until_here(lambda: len(codes) > 10)
            for pod in reversed(servers):
                num_before = len(codes)
                pod.stop()
                pod.start()
                until_here(lambda num_before=num_before: len(codes) > num_before + 10)
    assert set(codes) == {200}
    assert len(ends) > 2
    assert set(ends) == {"data: [DONE]"}
    assert seen == {f"127.0.0.1:{pod.port}" for pod in servers}
