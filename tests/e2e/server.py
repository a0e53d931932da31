"""A real server: both processes, real sockets, the installed command."""

import json
import os
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tests.kills import signal_all
from tests.patience import PATIENCE_S, Stopwatch, until_here

FIRST_PORT = 10_000


def free_port() -> int:
    """One on which nothing listens. It lies below those that the kernel gives to connections, so that nobody gets it by
    chance between this look and a server's start, or while a server starts again."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # Not of the generator that the tests seed: workers that run beside each other would draw the same.
        port = FIRST_PORT + secrets.randbelow(ephemeral - FIRST_PORT)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class RunningServer:
    """``neaptide serve``, or another command, on a loopback port; killed hard at the end of the context if it has not
    stopped.

    In ``directory`` it has its log, and its data in a directory of their own.
    """

    def __init__(
        self,
        directory: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        command: str = "serve",
        cwd: Path | None = None,
    ) -> None:
        self.data_dir = directory / "data"
        self._log_path = directory / "server.log"
        self.port = free_port()
        self._command = [sys.executable, "-m", "neaptide", command, *flags]
        self._command += ["--port", str(self.port)]
        if command != "gateway":  # it stores nothing
            self._command += ["--data-dir", str(self.data_dir)]
        self._env, self._cwd = os.environ | (env or {}), cwd
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def __enter__(self) -> "RunningServer":
        try:
            self.start()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.http.close()

    def start(self) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._env, cwd=self._cwd, stdin=subprocess.DEVNULL
            )
        self.wait_ready()

    def be_ready(self) -> None:
        """Starts it again if it has ended."""
        if self.process.poll() is None:
            self.wait_ready()
        else:
            self.start()

    def wait_ready(self) -> None:
        # A server that starts needs the processor more than those who ask whether it has.
        self.wait_for(self._is_ready, every_s=0.05)

    def wait_for(self, condition: Callable[[], object], every_s: float = 0.005) -> None:
        def holds() -> object:
            if found := condition():
                return found
            assert self.process.poll() is None, f"the server ended:\n{self.log[-3000:]}"
            return False

        until_here(holds, lambda: f"waited in vain; the server's log ends:\n{self.log[-3000:]}", every_s)

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def engine(self) -> psutil.Process:
        (engine,) = self._engines()
        return engine

    def _engines(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                found += [child] if "neaptide.launch.serve" in child.cmdline() else []
        return found

    def wait_for_another_engine(self, old: psutil.Process) -> None:
        """An engine that is not this one is ready. The time between two is too short to be looked for."""
        self.wait_for(lambda: any(engine.pid != old.pid for engine in self._engines()))
        self.wait_ready()

    def kill_both(self) -> None:
        """SIGKILL for both processes at one moment. The engine may follow its parent before its own has come."""
        engine = self.engine
        signal_all([psutil.Process(self.process.pid), engine], signal.SIGKILL)
        self.process.wait()
        _, alive = psutil.wait_procs([engine], timeout=PATIENCE_S)
        assert not alive

    def request_log(self) -> list[dict[str, Any]]:
        """What the engine executed: its own witness."""
        return [json.loads(line) for line in (self.data_dir / "engine-requests.jsonl").read_text().splitlines()]


def stream_events(server: RunningServer, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """Events of a streamed chat as they come."""
    request = body | {"stream": True}
    with httpx.stream("POST", f"{server.base_url}/chat/completions", json=request, timeout=PATIENCE_S) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: "):
                yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def durable_lines(data_dir: Path) -> set[str]:
    """Ids of the lines whose result is committed, read behind the server's back."""
    (database,) = data_dir.glob("*.db")
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute("select custom_id from batch_lines where state in ('completed', 'failed')")
        found = {row[0] for row in rows}
    connection.close()
    return found


def lines_run_again(server: RunningServer, batch_id: str, executed_before: int) -> set[str]:
    """Ids of the lines that an engine has started since its log had so many entries."""
    again = {event["id"] for event in server.request_log()[executed_before:] if event["event"] == "start"}
    return {f"c{request_id.partition(':')[2]}" for request_id in again if request_id.startswith(batch_id)}


def submit_batch(
    server: RunningServer, bodies: list[dict[str, Any]], endpoint: str = "/v1/chat/completions", window: str = "24h"
) -> str:
    """Uploads the lines and creates the batch; returns its id."""
    lines = [
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": endpoint, "body": body})
        for i, body in enumerate(bodies)
    ]
    files = {"file": ("lines.jsonl", "\n".join(lines).encode(), "application/jsonl")}
    upload = server.http.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status().json()
    body = {"input_file_id": upload["id"], "endpoint": endpoint, "completion_window": window}
    return str(server.http.post("/v1/batches", json=body).raise_for_status().json()["id"])


def get_batch(server: RunningServer, batch_id: str) -> dict[str, Any]:
    batch: dict[str, Any] = server.http.get(f"/v1/batches/{batch_id}").raise_for_status().json()
    return batch


def wait_terminal(server: RunningServer, batch_id: str) -> dict[str, Any]:
    server.wait_for(lambda: get_batch(server, batch_id)["status"] in ("completed", "failed", "expired", "cancelled"))
    return get_batch(server, batch_id)


def result_lines(server: RunningServer, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Every line of the output file and the error file."""
    lines: list[dict[str, Any]] = []
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            content = server.http.get(f"/v1/files/{batch[name]}/content").raise_for_status().content
            lines += [json.loads(line) for line in content.splitlines()]
    return lines


def stop_for_good(server: RunningServer, stream: Iterator[dict[str, Any] | str]) -> None:
    """SIGSTOP of the engine while a client streams: it is told in time, and another engine takes over."""
    old = server.engine
    old.suspend()
    watch = Stopwatch()
    *_, error, _ = stream
    assert isinstance(error, dict)
    assert error["error"]["code"] == "engine_unavailable"
    assert watch.seconds < 12.0
    server.wait_for_another_engine(old)
    assert not psutil.pid_exists(old.pid)
