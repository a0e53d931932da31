"""Forwarding of HTTP requests: parts that every forwarder uses, and the one of front processes."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from pathlib import Path

import httpx
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neaptide.server.http.auth import OPEN_PATHS
from neaptide.server.http.error_replies import error_response
from neaptide.server.http.errors import server_stops
from neaptide.server.http.middleware import PROBES_ONLY, new_request_id

logger = logging.getLogger(__name__)

OF_A_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
"""Headers that apply to one connection only."""
OF_THE_SERVER = frozenset((b"date", b"server"))
"""Headers of a reply that belong to who sends it: a server adds its own date, and names no software."""
CLIENT_ADDRESS = b"x-neaptide-client-address"
"""Header from a front process to the owner: the address of the client."""
_WITH_A_BODY = (b"content-length", b"transfer-encoding")

Headers = list[tuple[bytes, bytes]]


def without(headers: Iterable[tuple[bytes, bytes]], names: Collection[bytes]) -> Headers:
    """The headers but for those with these lower-case names; names become lower-case."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in names]


async def until_left(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_as_it_comes(receive: Receive) -> AsyncIterator[bytes]:
    """Yields the pieces of a request's body. Raises ClientDisconnect."""
    has_more = True
    while has_more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        has_more = message.get("more_body", False)
        if piece := message.get("body", b""):
            yield piece


class Forwarder:
    """ASGI app of a front process: ``app`` answers some paths, and the owner all others.

    Args:
        paths: what ``app`` answers.
        owner: the owner's unix socket.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str], owner: Path) -> None:
        self._app = app
        self._paths = paths
        # Each request has a connection of its own: one that is kept might be closed just when it is used.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(owner), limits=limits),
            timeout=httpx.Timeout(None),  # a reply may take as long as the client waits
            trust_env=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._paths or _is_refused(scope):
            await self._app(scope, receive, send)
            return
        has_body = any(name in _WITH_A_BODY for name, _ in scope["headers"])
        is_read = asyncio.Event()
        exchange = asyncio.ensure_future(self._exchange(scope, _content(receive, is_read) if has_body else None, send))
        left = asyncio.ensure_future(_left_after(is_read, receive) if has_body else until_left(receive))
        try:
            await asyncio.wait({exchange, left}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                exchange.result()
        except ClientDisconnect:
            pass
        finally:
            exchange.cancel()
            left.cancel()
            await asyncio.gather(exchange, left, return_exceptions=True)

    async def close(self) -> None:
        await self._http.aclose()

    async def _exchange(self, scope: Scope, content: AsyncIterator[bytes] | None, send: Send) -> None:
        has_begun = False
        try:
            response = await self._http.send(_request(scope, content), stream=True)
            async with contextlib.aclosing(response):
                # The owner may end a connection, and so does this process then.
                kept = without(response.headers.raw, (OF_A_CONNECTION | OF_THE_SERVER) - {b"connection"})
                await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                has_begun = True
                async for data in response.aiter_raw():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError as error:
            if has_begun:  # The reply stays incomplete, so the connection is closed.
                logger.warning("a reply of the owner was cut: %s", type(error).__name__)
                return
            reply = error_response(server_stops())
            reply.headers["x-request-id"] = new_request_id()
            await reply(scope, _nothing, send)


def _request(scope: Scope, content: AsyncIterator[bytes] | None) -> httpx.Request:
    headers = without(scope["headers"], {*OF_A_CONNECTION, b"expect", CLIENT_ADDRESS})
    if scope.get("client") is not None:
        headers.append((CLIENT_ADDRESS, scope["client"][0].encode()))
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    # A server takes "#" for a character of the path, but no URL may contain it there.
    url = httpx.URL("http://owner").copy_with(raw_path=target.replace(b"#", b"%23"))
    return httpx.Request(scope["method"], url, headers=headers, content=content)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _is_refused(scope: Scope) -> bool:
    """Whether the connection is above the cap, and the path no probe."""
    return bool(scope.get("state", {}).get(PROBES_ONLY)) and scope["path"] not in OPEN_PATHS


async def _content(receive: Receive, is_read: asyncio.Event) -> AsyncIterator[bytes]:
    async for piece in body_as_it_comes(receive):
        yield piece
    is_read.set()


async def _left_after(is_read: asyncio.Event, receive: Receive) -> None:
    await is_read.wait()
    await until_left(receive)


def with_client_addresses(app: ASGIApp) -> ASGIApp:
    """The owner's app behind front processes: requests over its unix socket have the address of the front's client.

    A request over a network has an address already, so no client can choose its own.
    """

    async def addressed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("client") is None:
            address = next((value for name, value in scope["headers"] if name == CLIENT_ADDRESS), None)
            scope["client"] = None if address is None else (address.decode(), 0)
            scope["headers"] = without(scope["headers"], {CLIENT_ADDRESS})
        await app(scope, receive, send)

    return addressed
