"""Servers that something else starts: where a gateway finds them, and which of them get requests."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from neaptide import cli
from neaptide.cluster.gateway.addresses import Addresses, follow, listed, look_up, name_and_port
from neaptide.cluster.gateway.replicas import ReplicaStatus
from tests.cluster.gateway.conftest import CHAT, TO_STREAM, Cluster, ScriptedReplica
from tests.cluster.gateway.test_stopping import refuse
from tests.patience import until
from tests.server.engine_client.loop_clock import LoopClock


def test_a_list_names_each_server_by_host_and_port() -> None:
    assert listed(["http://a:8000", " https://10.0.0.1:8443/", "http://[::1]:8000"]) == {
        "a:8000": "http://a:8000",
        "10.0.0.1:8443": "https://10.0.0.1:8443",
        "[::1]:8000": "http://[::1]:8000",
    }


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["a:8000"], "'a:8000' is not of the form http://HOST:PORT"),
        (["http://a"], "'http://a' is not of the form http://HOST:PORT"),
        (["http://a:8000/v1"], "'http://a:8000/v1' is not of the form http://HOST:PORT"),
        (["http://a:80000"], "'http://a:80000' is not of the form http://HOST:PORT"),
        (["http://key@a:8000"], "'http://key@a:8000' is not of the form http://HOST:PORT"),
        (["http://a:1", "http://a:1"], "a:1 occurs twice"),
        ([""], "'' is not of the form http://HOST:PORT"),
    ],
)
def test_a_list_that_makes_no_sense(urls: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        listed(urls)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--servers", "a"], "argument --servers: 'a' is not of the form http://HOST:PORT"),
        (["--servers-dns", "servers"], "argument --servers-dns: 'servers' is not of the form NAME:PORT"),
        (["--servers-dns", "servers:0"], "argument --servers-dns: 'servers:0' is not of the form NAME:PORT"),
        ([], "one of the arguments --servers --servers-dns is required"),
        (["--servers", "http://a:1", "--servers-dns", "a:1"], "not allowed with argument"),
        (["--servers", "http://a:1", "--kv-cache-gib", "1"], "unrecognized arguments: --kv-cache-gib"),
    ],
)
def test_the_command_says_in_one_line_what_it_does_not_take(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["gateway", *words])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_a_name_and_its_port() -> None:
    assert name_and_port("servers.models.svc:8000") == ("servers.models.svc", 8000)


async def test_every_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def getaddrinfo(name: str, port: int, **kwargs: object) -> list[object]:
        asked.append((name, port))
        of_four = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*of_four, ("10.0.0.2", port)), (*of_four, ("10.0.0.1", port)), (*of_four, ("10.0.0.2", port)),
                (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", port, 0, 0))]  # fmt: skip

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await look_up("servers", 8000) == {
        "10.0.0.1:8000": "http://10.0.0.1:8000",
        "10.0.0.2:8000": "http://10.0.0.2:8000",
        "[fd00::1]:8000": "http://[fd00::1]:8000",
    }
    assert asked == [("servers", 8000)]


async def test_an_address_is_looked_up_as_it_is() -> None:
    assert await look_up("127.0.0.1", 8000) == {"127.0.0.1:8000": "http://127.0.0.1:8000"}


class Directory:
    """Stands for a resolver."""

    def __init__(self) -> None:
        self.found: Addresses | OSError = {}
        self.num_asked = 0

    async def find(self) -> Addresses:
        self.num_asked += 1
        if isinstance(self.found, OSError):
            raise self.found
        return self.found

    @asynccontextmanager
    async def followed(self, cluster: Cluster) -> AsyncIterator[None]:
        task = asyncio.create_task(follow(self.find, cluster.gateway.replicas))
        try:
            await until(lambda: self.num_asked)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def directory() -> Directory:
    return Directory()


FOLLOW_S = 1000.0
"""So long that it is never over by itself, however slow the machine is."""


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    monkeypatch.setattr("neaptide.cluster.gateway.addresses.FOLLOW_S", FOLLOW_S)
    return LoopClock(asyncio.get_running_loop())


async def served(cluster: Cluster, name: str, slack_ms: float = 1000.0) -> ScriptedReplica:
    """A server that the gateway does not know so far."""
    replica = await cluster.add(name, slack_ms)
    cluster.gateway.replicas.leave(name)
    return replica


async def test_a_server_that_comes_gets_requests_and_one_that_is_gone_leaves(
    cluster: Cluster, directory: Directory, clock: LoopClock
) -> None:
    first, second = await served(cluster, "a"), await served(cluster, "b")
    directory.found = {"a": first.url}
    async with directory.followed(cluster):
        await cluster.until("a", ReplicaStatus.READY)
        directory.found = {"b": second.url}
        await clock.pass_s(FOLLOW_S)
        await cluster.until("b", ReplicaStatus.READY)
        # It works as long as it says so: a name server may be ahead of it.
        assert set(cluster.states()) == {"a", "b"}
        first.status = 503
        await cluster.until("a", ReplicaStatus.CLOSED)
        await clock.pass_s(FOLLOW_S)
        await until(lambda: set(cluster.states()) == {"b"})
    assert await cluster.asked(CHAT, TO_STREAM) == (200, {"from": "b"})


async def test_while_the_look_up_fails_the_known_servers_stay(
    cluster: Cluster, directory: Directory, clock: LoopClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = await served(cluster, "a")
    directory.found = {"a": server.url}
    async with directory.followed(cluster):
        await cluster.until("a", ReplicaStatus.READY)
        directory.found = OSError("no name server answers")
        num_asked = directory.num_asked
        for further in (1, 2):
            await clock.pass_s(FOLLOW_S)
            await until(lambda further=further: directory.num_asked == num_asked + further)
        assert await cluster.asked(CHAT, TO_STREAM) == (200, {"from": "a"})
    assert [record.getMessage() for record in caplog.records if "look up" in record.message] == [
        "cannot look up the servers: no name server answers"
    ]


async def test_a_server_that_stops_and_starts_again_at_its_address_gets_requests_again(
    cluster: Cluster, directory: Directory, clock: LoopClock
) -> None:
    stopping, other = await served(cluster, "a", slack_ms=9000.0), await served(cluster, "b", slack_ms=500.0)
    directory.found = {"a": stopping.url, "b": other.url}
    async with directory.followed(cluster):
        for name in "ab":
            await cluster.until(name, ReplicaStatus.READY)
        answers, stopping.handler = stopping.handler, refuse
        assert await cluster.asked(CHAT, TO_STREAM) == (200, {"from": "b"})
        assert list(cluster.states()) == ["b"]
        stopping.handler = answers
        await clock.pass_s(FOLLOW_S)
        await cluster.until("a", ReplicaStatus.READY)
        assert await cluster.asked(CHAT, TO_STREAM) == (200, {"from": "a"})


async def test_an_update_keeps_what_it_finds_again(cluster: Cluster) -> None:
    await cluster.add("kept")
    await cluster.add("moved")
    replicas = cluster.gateway.replicas
    kept, moved = replicas.all
    found = {"kept": kept.url, "moved": "http://127.0.0.1:1", "new": "http://127.0.0.1:2"}
    replicas.update(found)
    assert {replica.name: replica.url for replica in replicas.all} == found
    assert kept in replicas.all
    assert moved not in replicas.all
