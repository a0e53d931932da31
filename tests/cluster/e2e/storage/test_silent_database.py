"""A whole server beside a database that is silent for a minute: stopped processes, a silent proxy, a locked table."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.cluster.storage.silence import SilentProxy, locked_table, stopped_backends
from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer, get_batch, result_lines, submit_batch, wait_terminal
from tests.postgres import PostgresServer

BEFORE_S, SILENT_S = 10, 60
MOST_OF_A_CALL_S = 15.0
PAUSE_S = 0.1
NUM_LINES = 3_000
BODY = {
    "model": "neaptide-tiny",
    "messages": [{"role": "user", "content": "2+2="}],
    "max_tokens": 8,
    "ignore_eos": True,
}


class Calls:
    """Of one kind, one after another in a thread: how long each took, and what came."""

    def __init__(self, server: RunningServer, send: Callable[[httpx.Client], httpx.Response]) -> None:
        self._http, self._send = server.http, send
        self.took_s: list[float] = []
        self.statuses: list[int] = []

    def run(self, ends: threading.Event) -> None:
        while not self.took_s or not ends.is_set():
            started_s = time.monotonic()
            self.statuses.append(self._send(self._http).status_code)
            self.took_s.append(time.monotonic() - started_s)
            ends.wait(PAUSE_S)


def upload(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{}")})


def chat(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/chat/completions", json=BODY)


@contextmanager
def calling(calls: list[Calls]) -> Iterator[None]:
    ends = threading.Event()
    with ThreadPoolExecutor(len(calls)) as pool:
        running = [pool.submit(one.run, ends) for one in calls]
        try:
            yield
        finally:
            ends.set()
        for one in running:
            one.result()


Silence = AbstractContextManager[None]


def quantile(calls: list[Calls], share: float) -> float:
    took_s = sorted(s for one in calls for s in one.took_s)
    return took_s[int(share * (len(took_s) - 1))]


@pytest.mark.full
@pytest.mark.parametrize("way", ["silent proxy", "stopped backends", "locked tables"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_a_minute_of_silence_holds_no_call_and_no_chat(
    tmp_path: Path, postgres_server: PostgresServer, way: str, is_shared: bool
) -> None:
    database = postgres_server.new_database()
    with closing(SilentProxy(postgres_server)) as proxy, ExitStack() as stack:
        flags = ["--store", proxy.url(database), "--shadow", "off"]
        flags += ["--blobs", f"file://{tmp_path}/blobs"] if is_shared else []
        server = stack.enter_context(RunningServer(tmp_path / "server", *flags, env=SIM))
        batch_id = submit_batch(server, [BODY] * NUM_LINES)
        server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] > 20)
        file_id = get_batch(server, batch_id)["input_file_id"]
        create = {"input_file_id": "file-none", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        of_store = [
            Calls(server, lambda client: client.get(f"/v1/batches/{batch_id}")),
            Calls(server, lambda client: client.get("/v1/files")),
            Calls(server, lambda client: client.get(f"/v1/files/{file_id}/content")),
            Calls(server, lambda client: client.post("/v1/batches/batch_none/cancel")),
            Calls(server, lambda client: client.post("/v1/batches", json=create)),
            Calls(server, upload),
        ]
        others = [Calls(server, partial(httpx.Client.get, url=path)) for path in ("/ready", "/health", "/metrics")]
        before, chats = ([Calls(server, chat) for _ in range(2)] for _ in range(2))
        ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "silent proxy": proxy.silence,
            "stopped backends": lambda: stopped_backends(postgres_server, database),
            "locked tables": lambda: locked_table(postgres_server, database, "files, batches, batch_lines"),
        }
        with calling([*of_store, *others, *before]):
            time.sleep(BEFORE_S)
        with calling([*of_store, *others, *chats]), ways[way]():
            time.sleep(SILENT_S)
            assert "neaptide_storage_failing 1.0" in server.http.get("/metrics").text
        for one in of_store:
            assert max(one.took_s) <= MOST_OF_A_CALL_S
            assert {status for status in one.statuses if status >= 500} == {503}
        for one in [*others, *before, *chats]:
            assert set(one.statuses) == {200}
        print("longest call", max(max(one.took_s) for one in of_store), "other", max(max(o.took_s) for o in others))
        print("chats p50, p99:", [round(quantile(some, share), 3) for some in (before, chats) for share in (0.5, 0.99)])
        assert quantile(chats, 0.5) <= 2 * quantile(before, 0.5)
        done = wait_terminal(server, batch_id)
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", NUM_LINES)
        ids = [line["custom_id"] for line in result_lines(server, done)]
        assert sorted(ids) == sorted(f"c{number}" for number in range(NUM_LINES))
        assert upload(server.http).status_code == 200
        server.wait_for(lambda: "neaptide_storage_failing 0.0" in server.http.get("/metrics").text)
