"""``neaptide gateway``: a real server and a real gateway that finds it by name."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer

KEY = "sk-gateway"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("gateway")
    keys = ("--api-key", KEY)
    with RunningServer(directory / "server", *keys, "--shadow", "off", env=SIM) as server:
        where = f"localhost:{server.port}"
        with RunningServer(directory / "gateway", "--servers-dns", where, *keys, command="gateway") as gateway:
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
