"""``neaptide gateway``: a real server and a real gateway that finds it by name, and a second one beside it."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer

KEY = "sk-gateway"
KEYS = ("--api-key", KEY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("server"), *KEYS, "--shadow", "off", env=SIM) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    where = ("--servers-dns", f"localhost:{server.port}")
    with RunningServer(tmp_path_factory.mktemp("gateway"), *where, *KEYS, command="gateway") as gateway:
        yield gateway


def test_a_chat_goes_through_to_a_server(gateway: RunningServer) -> None:
    client = OpenAI(base_url=gateway.base_url, api_key=KEY, max_retries=0)
    messages = [{"role": "user", "content": "What is 2+2?"}]
    raw = client.chat.completions.with_raw_response.create(
        model="neaptide-tiny",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=4,
    )
    assert raw.headers["x-neaptide-replica"].startswith("127.0.0.1:")
    assert raw.parse().usage.completion_tokens == 4  # type: ignore[union-attr]
    chunks = client.chat.completions.create(
        model="neaptide-tiny",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=4,
        stream=True,
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_a_gateway_checks_keys_as_a_server_does(gateway: RunningServer) -> None:
    reply = gateway.http.post("/v1/chat/completions", json={"messages": []}, headers={"authorization": "Bearer no"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert gateway.http.get("/cluster").status_code == 401


def test_a_gateway_shows_its_servers_and_how_many_are_needed(gateway: RunningServer) -> None:
    shown = gateway.http.get("/cluster", headers={"authorization": f"Bearer {KEY}"}).json()["replicas"]
    assert [(one["name"].partition(":")[0], one["state"]) for one in shown] == [("127.0.0.1", "ready")]
    gateway.wait_for(lambda: "neaptide_cluster_replicas_wanted 1.0" in gateway.http.get("/metrics").text)


def test_while_one_gateway_is_frozen_another_answers_and_nothing_is_lost(
    server: RunningServer, gateway: RunningServer, tmp_path: Path
) -> None:
    where = ("--servers", f"http://127.0.0.1:{server.port}")
    with RunningServer(tmp_path, *where, *KEYS, command="gateway") as other:
        body = {"prompt": "2+2=", "max_tokens": 9, "ignore_eos": True}
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        with gateway.http.stream("POST", "/v1/completions", json=streamed, headers={"api-key": KEY}) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            gateway.process.send_signal(signal.SIGSTOP)
            try:
                answer = other.http.post("/v1/completions", json=body, headers={"api-key": KEY})
            finally:
                gateway.process.send_signal(signal.SIGCONT)
            events = [first, *lines]
    assert answer.json()["usage"]["completion_tokens"] == 9
    *_, usage, end = filter(None, events)
    assert '"completion_tokens":9' in usage
    assert end == "data: [DONE]"
