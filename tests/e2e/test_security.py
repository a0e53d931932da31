"""The real server from outside: its ports, its log, its files, and raw requests that no client would send.

It runs with ``PYTHONOPTIMIZE``, so every check that holds here holds without ``assert``.
"""

import json
import os
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal
from tests.patience import PATIENCE_S
from tests.server.http.test_errors import BAD_CHAT, BAD_COMPLETIONS

KEY = "key-canary-93b1"
CANARY = "canary-5e1f\r\nforged\x1b[31m"
USER = [{"role": "user", "content": CANARY}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    env = {
        "NEAPTIDE_EXECUTOR": "sim",
        "NEAPTIDE_SIM_STEP_MS": "1",
        "PYTHONOPTIMIZE": "1",
        "NEAPTIDE_LOG_LEVEL": "debug",
    }
    with RunningServer(tmp_path_factory.mktemp("secure"), "--api-key", KEY, env=env) as running:
        running.http.headers["Authorization"] = f"Bearer {KEY}"
        yield running


def processes(server: RunningServer) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def raw(server: RunningServer, head: str) -> bytes:
    """What the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_one_port_listens_and_nothing_calls_out(server: RunningServer) -> None:
    batch_id = submit_batch(server, [{"model": "neaptide-tiny", "messages": USER, "max_tokens": 2}] * 3)
    assert wait_terminal(server, batch_id)["status"] == "completed"
    found = [c for process in processes(server) for c in process.net_connections("inet")]
    listening = {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
    assert listening == {server.port}
    assert {c.laddr.ip for c in found} == {"127.0.0.1"}
    # Whatever else is open was opened towards us.
    assert {c.laddr.port for c in found} == {server.port}


def test_the_engines_socket_is_its_owners_alone(server: RunningServer) -> None:
    unix = {c.laddr for process in processes(server) for c in process.net_connections("unix") if c.laddr}
    paths = [path for path in unix if os.path.exists(path)]
    assert paths
    for path in paths:
        assert os.stat(path).st_mode & 0o077 == 0 or os.stat(os.path.dirname(path)).st_mode & 0o077 == 0, path


@pytest.mark.acceptance("A27", "raw requests without a key over a socket")
@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("//v1/models", "x"),
        ("/v1/../v1/models", "x"),
        ("/health/../v1/models", "x"),
        ("/health/%2e%2e/v1/models", "x"),
        ("/v1/models/", "x"),
        ("/%761/models", "x"),
        ("/health?/../v1/models", "x/v1/models?"),
        ("/v1/models?/health", "x"),
        ("/v1/models#/health", "x"),
        ("/v1/models", "x/foo?"),
        ("/v1/models", "x/health?"),
        ("http://x/v1/models", "x"),
        ("http://health/v1/models", "health"),
        ("/v1/models%00/health", "x"),
    ],
)
def test_raw_requests_without_a_key_see_nothing(server: RunningServer, target: str, host: str) -> None:
    reply = raw(server, f"GET {target} HTTP/1.1\r\nHost: {host}")
    assert b"neaptide-tiny" not in reply
    status = int(reply.split(b" ", 2)[1])
    assert status in ((200, 400) if target.startswith("/health?") else (400, 401, 404)), reply


@pytest.mark.acceptance("A24", "every refusal of the boundary table with Python's asserts off", count=90)
def test_refusals_need_no_assert(server: RunningServer) -> None:
    assert "PYTHONOPTIMIZE" in psutil.Process(server.process.pid).environ()
    for fields, _, _ in BAD_CHAT:
        body = {"model": "neaptide-tiny", "messages": USER, **fields}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 400, fields
    for fields, _, _ in BAD_COMPLETIONS:
        body = {"model": "neaptide-tiny", "prompt": "x", **fields}
        assert server.http.post("/v1/completions", json=body).status_code == 400, fields


@pytest.mark.acceptance("A28", "prompts, keys and headers in the logs of both processes and in file names", count=6)
def test_the_log_is_json_and_keeps_secrets(server: RunningServer) -> None:
    server.http.post("/v1/chat/completions", json={"model": "neaptide-tiny", "messages": USER, "max_tokens": 2})
    server.http.post("/v1/chat/completions", json={"model": CANARY, "messages": USER})
    server.http.get("/v1/models", headers={"Authorization": "Bearer canary-5e1f"})
    server.http.get("/canary-5e1f%0d%0aforged", headers={"X-Request-Id": "canary-5e1f forged"})
    batch = wait_terminal(server, submit_batch(server, [{"model": "neaptide-tiny", "messages": USER, "max_tokens": 1}]))
    assert len(result_lines(server, batch)) == 1
    witness = (server.data_dir / "engine-requests.jsonl").read_text()
    lines = server.log.splitlines()
    for text in (server.log, witness):
        assert "canary" not in text
        assert "forged" not in text
    assert all(isinstance(json.loads(line), dict) for line in lines)
    (request,) = [r for r in map(json.loads, lines) if r.get("completion_tokens") == 2 and r["tier"] == "default"]
    wanted = {"request_id", "tier", "model", "outcome", "prompt_tokens", "queue_ms", "ttft_ms", "e2e_ms", "preemptions"}
    assert wanted <= set(request)
    # Lines of libraries, too.
    assert {r["logger"].partition(".")[0] for r in map(json.loads, lines)} > {"neaptide"}
    for path in server.data_dir.rglob("*"):
        assert "canary" not in path.name
        assert path.stat().st_mode & 0o077 == 0


def test_both_processes_log_json(embedded: RunningServer) -> None:
    lines = [json.loads(line) for line in embedded.log.splitlines()]
    engine = {line["pid"] for line in lines if "warmed up" in line.get("message", "")}
    assert engine == {embedded.engine.pid}
    assert embedded.process.pid in {line["pid"] for line in lines}


def test_another_sites_name_for_this_machine_is_refused(simulated: RunningServer) -> None:
    reply = simulated.http.get("/v1/models", headers={"host": "evil.example"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unknown_host")
