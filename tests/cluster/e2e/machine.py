"""``neaptide cluster``: several real servers behind one address."""

import json
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.server import RunningServer
from tests.kills import signal_all
from tests.patience import PATIENCE_S, until_here

STREAM = {
    "model": "neaptide-tiny",
    "messages": [{"role": "user", "content": "2+2="}],
    "max_tokens": 1_000,
    "ignore_eos": True,
    "stream": True,
}
"""Of 10 s, with steps of 10 ms."""


def flags_of(settings: Iterable[tuple[str, Any]]) -> list[str]:
    """Words of a command line, for settings by name."""
    return [word for name, value in settings for word in (f"--{name.replace('_', '-')}", str(value))]


class RunningCluster(RunningServer):
    def __init__(self, directory: Path, *flags: str, env: dict[str, str], replicas: str = "2") -> None:
        super().__init__(directory, "--replicas", replicas, *flags, env=env, command="cluster")
        self.num_replicas = int(replicas.partition(":")[0])
        """Of the beginning."""

    def start(self) -> None:
        """Returns when all replicas take work."""
        super().start()
        self.wait_all_ready()

    def wait_all_ready(self) -> None:
        self.wait_for(lambda: [one["state"] for one in self.shown()] == ["ready"] * self.num_replicas)

    def shown(self) -> list[dict[str, Any]]:
        """What ``/cluster`` says, by the replicas' names."""
        found: list[dict[str, Any]] = self.http.get("/cluster").raise_for_status().json()["replicas"]
        return sorted(found, key=lambda one: str(one["name"]))

    def replica(self, name: str) -> psutil.Process:
        """The API process of a replica."""
        port = next(one["url"] for one in self.shown() if one["name"] == name).rpartition(":")[2]
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(str(one.laddr.port) == port for one in process.net_connections("tcp") if one.status == "LISTEN"):
                    return process
        raise AssertionError(f"no process listens for {name}")

    def kill(self, name: str) -> None:
        """SIGKILL for a replica's processes at one moment; returns when nothing listens any more."""
        server = self.replica(name)
        signal_all([server, *server.children(recursive=True)], signal.SIGKILL)
        until_here(lambda: is_gone(server))

    def roll(self) -> None:
        """All replicas are to be replaced, one after another."""
        self.process.send_signal(signal.SIGUSR2)

    def request_log(self, name: str = "replica-1") -> list[dict[str, Any]]:
        """What a replica's engine executed."""
        log = self.data_dir / name / "engine-requests.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()]


def is_gone(process: psutil.Process) -> bool:
    """It has ended, whether or not somebody has asked for its exit status: all of its threads have, for its sockets are
    open as long as one of them is."""
    try:
        is_zombie = process.is_running() and process.status() == psutil.STATUS_ZOMBIE
        return process.num_threads() == 1 if is_zombie else not process.is_running()
    except psutil.NoSuchProcess:
        return True


class Stream:
    """A chat that is being read."""

    def __init__(self, reply: httpx.Response) -> None:
        self.replica = reply.headers["x-neaptide-replica"]
        self._events = (line[6:] for line in reply.iter_lines() if line.startswith("data: "))

    def read(self, count: int) -> list[dict[str, Any]]:
        """The next events."""
        return [json.loads(next(self._events)) for _ in range(count)]

    def rest(self) -> list[str]:
        return list(self._events)


@contextmanager
def streaming(server: RunningServer, **changes: Any) -> Iterator[Stream]:
    body, headers = STREAM | changes, server.http.headers
    with httpx.stream(
        "POST", f"{server.base_url}/chat/completions", json=body, headers=headers, timeout=PATIENCE_S
    ) as reply:
        assert reply.status_code == 200
        yield Stream(reply)


def on_both(stack: ExitStack, cluster: RunningCluster, **changes: Any) -> dict[str, Stream]:
    """A stream on each replica, which has begun; others that it takes to get there are left at once."""
    streams: dict[str, Stream] = {}
    while len(streams) < cluster.num_replicas:
        with ExitStack() as one:
            stream = one.enter_context(streaming(cluster, **changes))
            stream.read(2)
            if stream.replica not in streams:
                streams[stream.replica] = stream
                stack.push(one.pop_all())
    return streams
