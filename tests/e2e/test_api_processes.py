"""A server with two API processes: a client uses a connection to either for anything, and counts hold over both."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer
from tests.patience import PATIENCE_S

KEYS = """
[[keys]]
key = "boss"
name = "boss"
admin = true

[[keys]]
key = "limited"
name = "limited"
requests_per_minute = 2
"""
MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "", "messages": MESSAGES}


class Processes(RunningServer):
    """A server with two API processes, which tests may kill."""

    def __init__(self, directory: Path) -> None:
        self.key_file = directory / "keys.toml"
        self.key_file.write_text(KEYS)
        flags = ("--api-processes", "2", "--api-key-file", str(self.key_file), "--max-online-requests", "2")
        super().__init__(directory, *flags, env=SIM)
        self.http.headers["authorization"] = "Bearer boss"

    @property
    def fronts(self) -> list[int]:
        """Ids of the front processes that serve."""
        serving = re.findall(r'"pid": (\d+), "message": "a further API process serves', self.log)
        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in children if str(child.pid) in serving and child.is_running()]

    def wait_ready(self) -> None:
        super().wait_ready()
        self.wait_for(lambda: self.fronts, every_s=0.05)

    @property
    def front(self) -> int:
        (pid,) = self.fronts
        return pid

    @contextmanager
    def client_of(self, pid: int, key: str = "boss") -> Iterator[openai.OpenAI]:
        """A client with one connection, which this API process has accepted."""
        with ExitStack() as undone:
            found: list[httpx2.Client] = []

            def is_connected() -> bool:
                limits = httpx2.Limits(max_connections=1)
                http = undone.enter_context(httpx2.Client(limits=limits, timeout=PATIENCE_S))
                reply = http.get(f"http://127.0.0.1:{self.port}/livez")
                _, port = reply.extensions["network_stream"].get_extra_info("client_addr")
                held = psutil.Process(pid).net_connections("tcp")
                if any(one.raddr and one.raddr.port == port for one in held):
                    found.append(http)
                return bool(found)

            self.wait_for(is_connected)
            yield openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=0, http_client=found[0])

    def change_keys(self, text: str) -> None:
        said = "the key file was read again"
        before = self.log.count(said)
        self.key_file.write_text(text)
        self.process.send_signal(signal.SIGHUP)
        self.wait_for(lambda: self.log.count(said) > before)

    def series(self, *names: str) -> list[float]:
        """For each name the sum of its series; labels may follow."""
        lines = self.http.get("/metrics").text.splitlines()
        return [sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in names]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(tmp_path_factory.mktemp("processes")) as server:
        yield server


@pytest.fixture
def server(running: Processes) -> Processes:
    running.be_ready()
    return running


def begin_stream(client: openai.OpenAI, max_tokens: int = 7000) -> openai.Stream[Any]:
    stream = client.chat.completions.create(**CHAT, max_tokens=max_tokens, stream=True)
    next(stream)
    return stream


def test_a_front_process_answers_as_the_owner_does(server: Processes) -> None:
    replies, streams, errors, headers = [], [], [], []
    for pid in (server.process.pid, server.front):
        with server.client_of(pid) as client:
            reply = client.chat.completions.with_raw_response.create(
                **CHAT, max_tokens=7, seed=1, extra_headers={"x-request-id": "mine"}
            )
            assert reply.headers["x-request-id"] == "mine"
            headers.append({name for name in reply.headers if name != "date"})
            whole = reply.parse().model_dump(exclude={"id", "created", "metrics"})
            replies.append(whole)
            options: Any = {"include_usage": True}
            stream = client.chat.completions.create(**CHAT, max_tokens=7, stream=True, stream_options=options)
            streams.append([chunk.model_dump(exclude={"id", "created", "metrics"}) for chunk in stream])
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**CHAT, max_tokens=-1)
            errors.append(caught.value.body)
    assert replies[0] == replies[1]
    assert replies[0]["usage"]["completion_tokens"] == 7
    assert streams[0] == streams[1]
    assert errors[0] == errors[1]
    assert headers[0] == headers[1]


def test_other_paths_go_to_the_owner(server: Processes) -> None:
    content = b"x" * 1_000_000
    with server.client_of(server.front) as client:
        file = client.files.create(file=("notes.txt", content), purpose="user_data")
        assert client.files.content(file.id).read() == content
        assert server.http.get(f"/v1/files/{file.id}").json()["bytes"] == len(content)
        client.files.delete(file.id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.files.retrieve(file.id)
        assert caught.value.response.headers["x-request-id"].startswith("req_")


def test_limits_of_a_key_hold_over_all_processes(server: Processes) -> None:
    names = ('neaptide_key_requests_total{key="limited"}', 'neaptide_key_refused_total{key="limited"')
    before = server.series(*names)
    with server.client_of(server.front, "limited") as front, server.client_of(server.process.pid, "limited") as owner:
        left = []
        for client in (front, owner):
            reply = client.chat.completions.with_raw_response.create(**CHAT, max_tokens=1)
            left.append(reply.headers["x-ratelimit-remaining-requests"])
        assert left == ["1", "0"]
        for client in (front, owner):
            with pytest.raises(openai.RateLimitError, match="requests per min") as caught:
                client.chat.completions.create(**CHAT, max_tokens=1)
            assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert [now - then for now, then in zip(server.series(*names), before, strict=True)] == [2, 2]


def test_requests_are_counted_once(server: Processes) -> None:
    names = (
        "neaptide_requests_total{",
        'neaptide_tokens_total{kind="generated",tier="default"}',
        'neaptide_request_ttft_seconds_count{tier="default"}',
        'neaptide_slo_attained_total{slo="ttft",tier="default"}',
        "vllm:generation_tokens_total",
        'neaptide_http_requests_total{code="200",method="GET",route="/v1/models"}',
        'neaptide_http_requests_total{code="404",method="POST",route="/v1/chat/completions"}',
    )
    before = server.series(*names)
    with server.client_of(server.front) as client:
        client.chat.completions.create(**CHAT, max_tokens=5)
        client.models.list()
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="another", messages=MESSAGES)
    # The owner learns of a front's HTTP replies a tenth of a second later.
    server.wait_for(lambda: server.series(names[-1]) > [before[-1]])
    after = server.series(*names)
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 5, 1, 1, 5, 1, 1]
    assert server.series("neaptide_requests_in_flight") == [0]


def test_the_bound_of_the_queue_holds_over_all_processes(server: Processes) -> None:
    with server.client_of(server.front) as front, server.client_of(server.process.pid) as owner:
        with begin_stream(owner), server.client_of(server.front) as second, begin_stream(second):
            (before,) = server.series('neaptide_admission_rejected_total{reason="overloaded"')
            assert server.http.get("/load").json() == {"server_load": 2}
            with pytest.raises(openai.InternalServerError) as caught:
                front.chat.completions.create(**CHAT, max_tokens=1)
            assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
            assert server.series('neaptide_admission_rejected_total{reason="overloaded"') == [before + 1]
        server.wait_for(lambda: server.http.get("/load").json() == {"server_load": 0})
        assert front.chat.completions.create(**CHAT, max_tokens=1).choices


def test_a_killed_front_process_takes_only_its_own_connections(server: Processes) -> None:
    pid = server.front
    with server.client_of(pid) as front, server.client_of(server.process.pid) as owner:
        lost, kept = begin_stream(front), begin_stream(owner, max_tokens=100)
        started = [event["id"] for event in server.request_log() if event["event"] == "start"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            list(lost)
        assert len(list(kept)) > 10
        # Aborted in the engine long before its 7000 tokens.
        server.wait_for(lambda: started[-2] in {one["id"] for one in server.request_log() if one["event"] == "end"})
    server.wait_for(lambda: server.series("neaptide_requests_in_flight") == [0])
    assert server.http.get("/load").json() == {"server_load": 0}
    server.wait_for(lambda: server.fronts and server.fronts != [pid])
    assert "an API process ended; it restarts in 0.5 s (killed by signal 9" in server.log
    with server.client_of(server.front) as front:
        assert front.chat.completions.create(**CHAT, max_tokens=1).choices


def test_streams_of_a_killed_engine_end_with_an_error(server: Processes) -> None:
    with server.client_of(server.front) as client:
        stream = begin_stream(client)
        server.engine.kill()
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "engine_unavailable"
        server.wait_ready()
        assert client.chat.completions.create(**CHAT, max_tokens=1).choices


def test_a_stop_signal_lets_streams_of_all_processes_end(server: Processes) -> None:
    pid = server.front
    with server.client_of(pid) as client, server.client_of(pid) as other:
        stream = begin_stream(client, max_tokens=100)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError) as caught:
            other.chat.completions.create(**CHAT, max_tokens=1)
        assert caught.value.code == "server_shutdown"
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
    assert server.process.wait(PATIENCE_S) == 0
    assert not psutil.pid_exists(pid)
    assert "Traceback" not in server.log


@pytest.mark.full
def test_a_killed_owner_ends_the_front_processes(server: Processes) -> None:
    front = psutil.Process(server.front)
    server.kill_both()
    front.wait(PATIENCE_S)


def test_changed_keys_reach_all_processes(server: Processes) -> None:
    server.change_keys(KEYS.replace("limited", "new"))
    with server.client_of(server.front, "new") as client:
        assert client.chat.completions.create(**CHAT, max_tokens=1).choices
    with server.client_of(server.front, "limited") as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(**CHAT, max_tokens=1)
    server.change_keys(KEYS)
