"""Processes that die, hang or are told to end, seen from outside."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from neaptide.launch.serve import embedded_model_path
from neaptide.server.text.tokenizer import Tokenizer
from tests.e2e.conftest import SIM
from tests.e2e.server import (
    RunningServer,
    get_batch,
    result_lines,
    stop_for_good,
    stream_events,
    submit_batch,
    wait_terminal,
)
from tests.patience import PATIENCE_S, Stopwatch

MODEL = "neaptide-tiny"
POISON = "\N{SNOWMAN}"


def body(text: str, max_tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_completion_tokens": max_tokens}


def events(server: RunningServer, max_tokens: int) -> Iterator[dict[str, Any] | str]:
    """Events of a streamed chat as they come."""
    return stream_events(server, body("hello", max_tokens))


@pytest.fixture
def server(simulated: RunningServer) -> RunningServer:
    return simulated


@pytest.mark.acceptance("A2", "streams open when the engine is killed", count=8)
def test_streams_of_a_killed_engine_end_with_an_error_at_once(server: RunningServer) -> None:
    streams = [events(server, 7000) for _ in range(8)]
    for stream in streams:
        next(stream)
    watch = Stopwatch()
    server.engine.kill()
    for stream in streams:
        *_, error, done = stream
        assert isinstance(error, dict)
        assert error["error"]["code"] == "engine_unavailable"
        assert done == "[DONE]"
    assert watch.seconds < 2.0
    server.wait_ready()
    assert server.http.post("/v1/chat/completions", json=body("hello", 3)).status_code == 200


@pytest.mark.acceptance("A2", "new requests while no engine runs")
def test_requests_without_an_engine_are_503_and_the_sdk_comes_back(server: RunningServer) -> None:
    refused: list[httpx.Response] = []

    def is_refused() -> bool:
        # Until it is: an engine may be back before one looks.
        with suppress(ValueError, psutil.NoSuchProcess):
            server.engine.kill()
        if server.http.get("/ready").status_code == 503:
            refused.append(server.http.post("/v1/chat/completions", json=body("hello", 3)))
        return bool(refused) and refused[-1].status_code == 503

    server.wait_for(is_refused)
    assert refused[-1].json()["error"]["code"] == "engine_unavailable"
    assert refused[-1].headers["retry-after"]
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=10)
    messages: Any = [{"role": "user", "content": "hello"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=3).choices


@pytest.mark.acceptance("A3", "a line that ends the engine process with SIGSEGV, among 7 that do not")
def test_poisoned_line_is_quarantined_and_the_others_complete(tmp_path: Path) -> None:
    token = next(t for t in Tokenizer(embedded_model_path()).encode(POISON) if t not in range(6))
    env = SIM | {"POISON_ID": str(token), "PYTHONPATH": str(Path(__file__).parent / "poison")}
    with RunningServer(tmp_path / "server", env=env) as server:
        texts = [POISON if i == 5 else f"line {i}" for i in range(8)]
        batch_id = submit_batch(server, [body(text, 20) for text in texts])
        batch = wait_terminal(server, batch_id)
        assert batch["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
        failed = {
            r["custom_id"]: r["response"] for r in result_lines(server, batch) if "error" in r["response"]["body"]
        }
        assert {k: v["body"]["error"]["code"] for k, v in failed.items()} == {"c5": "engine_crash"}
        assert 2 <= server.log.count("the engine ended; it restarts") <= 5  # 8 suspects, 4, 2, 1
        assert "Segmentation fault" in server.log
        assert server.http.post("/v1/chat/completions", json=body("hello", 3)).status_code == 200


@contextmanager
def held_stream(server: RunningServer, max_tokens: int) -> Iterator[Iterator[str]]:
    """Lines of a stream that does not end before they are taken: the prompt comes back twice, escaped, which is more
    than waits for a reader with a small buffer."""
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    request = {"model": MODEL, "prompt": "\x01" * 4500, "echo": True, "n": 2, "max_tokens": max_tokens, "stream": True}
    with (
        httpx.Client(transport=small, timeout=PATIENCE_S) as http,
        http.stream("POST", f"{server.base_url}/completions", json=request | {"ignore_eos": True}) as reply,
    ):
        assert reply.status_code == 200
        yield reply.iter_lines()


@pytest.mark.acceptance("A16", "SIGTERM to both processes in the middle of streams and a batch")
def test_stop_signal_lets_streams_end_and_keeps_the_batch(server: RunningServer) -> None:
    batch_id = submit_batch(server, [body(f"line {i}", 400) for i in range(50)])
    server.wait_for(lambda: get_batch(server, batch_id)["status"] == "in_progress")
    engine = server.engine
    with held_stream(server, 200) as stream:
        for process in (engine, psutil.Process(server.process.pid)):
            process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
        refused = httpx.post(f"{server.base_url}/chat/completions", json=body("late", 3), timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutdown")
        *chunks, done = [line.removeprefix("data: ") for line in stream if line.startswith("data: ")]
    reasons = [choice["finish_reason"] for chunk in map(json.loads, chunks) for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason is not None] == ["length"] * 2
    assert done == "[DONE]"
    assert server.process.wait(PATIENCE_S) == 0
    assert not engine.is_running()
    server.start()
    batch = wait_terminal(server, batch_id)
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert [line["custom_id"] for line in result_lines(server, batch)] == [f"c{i}" for i in range(50)]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_terminal_that_is_closed_lets_streams_end(server: RunningServer, number: signal.Signals) -> None:
    """It sends the signal to every process of the command."""
    if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup, which the server respects")
    engine = server.engine
    with held_stream(server, 50) as stream:
        for process in (engine, psutil.Process(server.process.pid)):
            process.send_signal(number)
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
        *_, done = [line.removeprefix("data: ") for line in stream if line.startswith("data: ")]
    assert done == "[DONE]"
    assert server.process.wait(PATIENCE_S) == 0
    assert not engine.is_running()


@pytest.mark.acceptance("A16", "SIGTERM twice while a stream runs")
def test_second_stop_signal_cuts_the_streams(server: RunningServer) -> None:
    stream = events(server, 7000)
    next(stream)
    engine = server.engine
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: server.http.get("/ready").status_code == 503)
    server.process.send_signal(signal.SIGTERM)
    *_, error, done = stream
    assert isinstance(error, dict)
    assert error["error"]["code"] == "server_shutdown"
    assert done == "[DONE]"
    assert server.process.wait(PATIENCE_S) == 0
    assert not engine.is_running()
    assert "Traceback" not in server.log


def after_a_kill(requests: int) -> pytest.MarkDecorator:
    return pytest.mark.acceptance("A17", "requests on the same port after SIGKILL of the API process", count=requests)


@pytest.mark.parametrize(
    "requests",
    [pytest.param(80, marks=after_a_kill(80)), pytest.param(1000, marks=[after_a_kill(1000), pytest.mark.full])],
)
def test_killed_api_process_takes_its_engine_along_and_the_port_serves_again(
    server: RunningServer, requests: int
) -> None:
    engine = server.engine
    server.process.kill()
    _, alive = psutil.wait_procs([engine], timeout=PATIENCE_S)
    assert not alive
    server.process.wait()
    server.start()
    statuses: list[int] = []

    def client() -> None:
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as http:
            for _ in range(requests // 8):
                statuses.append(http.post("/chat/completions", json=body("hello", 1)).status_code)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * requests


@pytest.mark.acceptance("A5", "SIGSTOP of the engine for good, with a client that streams")
@pytest.mark.full
def test_stopped_engine_is_replaced_within_ten_seconds(server: RunningServer) -> None:
    stream = events(server, 7000)
    next(stream)
    stop_for_good(server, stream)
    assert os.getpgid(server.engine.pid) == os.getpgid(server.process.pid)
