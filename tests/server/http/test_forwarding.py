"""Forwarding from a front process to its owner: the request as it was, the reply as it comes, and who leaves first."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from neaptide.server.http.forwarding import Forwarder, with_client_addresses
from neaptide.server.http.middleware import PROBES_ONLY

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


async def own_app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("own")(scope, receive, send)


class Client:
    """One request to the forwarder."""

    def __init__(self, path: str, headers: dict[str, str] | None = None, pieces: tuple[bytes, ...] = ()) -> None:
        self.sent: list[Message] = []
        self.has_left = asyncio.Event()
        self._pieces = list(pieces) or [b""]
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST" if pieces else "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"a=%20b",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("192.0.2.7", 5),
            "state": {},
        }

    async def receive(self) -> Message:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@asynccontextmanager
async def forwarding(tmp_path: Path, handle: Handler | None = None) -> AsyncIterator[Forwarder]:
    path = tmp_path / "owner.sock"
    server = None if handle is None else await asyncio.start_unix_server(handle, path)
    forwarder = Forwarder(own_app, ("/own",), path)
    try:
        yield forwarder
    finally:
        await forwarder.close()
        if server is not None:
            server.close()


async def test_the_owner_gets_the_request_as_it_was(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        body = await reader.readexactly(6)
        writer.write(b"HTTP/1.1 201 Created\r\nDate: then\r\nConnection: close\r\nX: y\r\n\r\n" + body)
        writer.close()

    headers = {"host": "name:1", "content-length": "6", "connection": "keep-alive", "x-neaptide-client-address": "::1"}
    client = Client("/v1/files/a%2Fb", headers, (b"abc", b"def"))
    async with forwarding(tmp_path, handle) as forwarder:
        await forwarder(client.scope, client.receive, client.send)
    line, *fields = heads[0].decode().rstrip().split("\r\n")
    assert line == "POST /v1/files/a%2Fb?a=%20b HTTP/1.1"
    assert set(fields) == {"host: name:1", "content-length: 6", "x-neaptide-client-address: 192.0.2.7"}
    assert (client.status, client.body) == (201, b"abcdef")
    assert client.sent[0]["headers"] == [(b"connection", b"close"), (b"x", b"y")]


async def test_a_client_that_leaves_ends_the_owners_work(tmp_path: Path) -> None:
    ended = asyncio.Event()
    client = Client("/v1/batches")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        client.has_left.set()
        assert await reader.read() == b""
        ended.set()
        writer.close()

    async with forwarding(tmp_path, handle) as forwarder:
        await forwarder(client.scope, client.receive, client.send)
        await ended.wait()
    assert client.sent == []


async def test_a_reply_is_sent_on_as_it_comes(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await go_on.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")
        writer.close()

    client = Client("/v1/files/f/content")

    async def send(message: Message) -> None:
        await client.send(message)
        if message.get("body") == b"first":
            go_on.set()

    async with forwarding(tmp_path, handle) as forwarder:
        await forwarder(client.scope, client.receive, send)
    assert client.body == b"firstlast"


async def test_without_an_owner_the_server_stops(tmp_path: Path) -> None:
    client = Client("/v1/models")
    async with forwarding(tmp_path) as forwarder:
        await forwarder(client.scope, client.receive, client.send)
    assert client.status == 503
    assert b"server_shutdown" in client.body
    assert b"x-request-id" in dict(client.sent[0]["headers"])


@pytest.mark.parametrize(("path", "is_crowded"), [("/own", False), ("/v1/models", True)])
async def test_some_requests_are_answered_here(tmp_path: Path, path: str, is_crowded: bool) -> None:
    """The generation endpoints, and what a connection above the cap may not ask."""
    client = Client(path)
    client.scope["state"][PROBES_ONLY] = is_crowded
    async with forwarding(tmp_path) as forwarder:
        await forwarder(client.scope, client.receive, client.send)
    assert client.body == b"own"


@pytest.mark.parametrize(("peer", "seen"), [(None, ("192.0.2.7", 0)), (("198.51.100.1", 9), ("198.51.100.1", 9))])
async def test_only_a_front_process_says_whose_request_it_is(peer: object, seen: object) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    client = Client("/admin/offline", {"x-neaptide-client-address": "192.0.2.7"})
    client.scope["client"] = peer
    await with_client_addresses(app)(client.scope, client.receive, client.send)
    assert scopes[0]["client"] == seen
