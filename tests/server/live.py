"""The app behind a real HTTP server in this process, and clients that speak bytes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from neaptide.server.http.middleware import MAX_HEADER_BYTES
from neaptide.server.http.transport import BoundedH11Protocol, TransportLimits, protocol_class
from neaptide.server.observe.metrics_http import HttpMetrics
from tests.patience import until


class Live:
    """A server that listens, and the raw connections to it."""

    def __init__(self, port: int, runner: uvicorn.Server, serving: asyncio.Future[None]) -> None:
        self.port = port
        self.runner = runner
        self.serving = serving
        """Done when the server has ended."""
        self.num_received_bytes = 0
        self._clients: list[RawClient] = []

    async def connect(self, receive_buffer_bytes: int | None = None) -> "RawClient":
        """With a small receive buffer the server soon notices a client that does not read."""
        peer = socket.socket()
        if receive_buffer_bytes is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        peer.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", self.port))
        except OSError:
            peer.close()
            raise
        client = RawClient(*await asyncio.open_connection(sock=peer, limit=1024))
        self._clients.append(client)
        return client

    async def until_heard(self) -> None:
        """The server knows of every client and has read all that they sent; for clients of which none has left."""
        await until(lambda: len(self.runner.server_state.connections) == len(self._clients))
        await until(lambda: self.num_received_bytes == sum(client.num_sent_bytes for client in self._clients))

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def serving(app: FastAPI, limits: TransportLimits | None = None, **options: Any) -> AsyncIterator[Live]:
    """Serves the app as ``launch`` does. ``options`` are uvicorn's.

    A connection may rest between two requests as long as a test takes.
    """
    options = {"timeout_keep_alive": 100_000} | options
    of_the_app = getattr(app.state, "metrics", None)
    metrics = HttpMetrics(CollectorRegistry()) if of_the_app is None else of_the_app.http
    own_waits = getattr(getattr(app.state, "context", None), "waits", None)
    protocol = protocol_class(limits or TransportLimits(), metrics, own_waits)
    config = uvicorn.Config(
        app,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level="critical",
        http=protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        **options,
    )
    runner = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # The listener queues connections until the server takes them.
        task = asyncio.ensure_future(runner.serve(sockets=[listener]))
        live = Live(listener.getsockname()[1], runner, task)
        data_received = protocol.data_received

        def count(connection: BoundedH11Protocol, data: bytes) -> None:
            live.num_received_bytes += len(data)
            data_received(connection, data)

        protocol.data_received = count  # type: ignore[method-assign]
        try:
            yield live
        finally:
            live.close()
            runner.should_exit = True
            await task


class RawClient:
    """One TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.num_sent_bytes = 0

    async def send(self, data: bytes) -> None:
        self.num_sent_bytes += len(data)
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """The next reply with a ``Content-Length``: status, headers, body."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await self.reader.readexactly(1)
        first, *lines = head.decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def refusal(self) -> tuple[int, str]:
        """Status and code of an error reply after which the server hangs up."""
        status, headers, body = await self.reply()
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert headers["x-request-id"].startswith("req_")
        assert headers["connection"] == "close"
        assert await self.reader.read() == b""
        return status, error["code"]

    def close(self) -> None:
        self.writer.transport.abort()


def request_bytes(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """A request; its ``Content-Length`` is the body's unless ``headers`` say otherwise."""
    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    fields |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body
