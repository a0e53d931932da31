"""One exchange passed on to a replica: its request there, its reply back as it comes."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable

import httpx
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from neaptide.cluster.gateway.replicas import Replica
from neaptide.server.edge.errors import NOT_BEGUN, UnavailableError
from neaptide.server.edge.hosts import is_own
from neaptide.server.edge.sse import DONE, event

logger = logging.getLogger(__name__)

_OF_A_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
"""Headers that say something of one connection, and not of what it carries."""
_OF_THE_SERVER = frozenset((b"date", b"server"))
"""Headers of a reply that the gateway's own server puts on it: there is to be one of each."""
_EVENTS = b"text/event-stream"
_EVENT_END = b"\n\n"

Content = bytes | AsyncIterator[bytes]


class NotSentError(Exception):
    """The replica took no connection, so another one may get the request."""


class RefusedError(Exception):
    """The replica is about to end and takes no new work, so another one may get the request."""


class ReplicaLostError(Exception):
    """It fell silent, or went away. ``is_told``: a reply had begun, and the client has been told or sees it cut."""

    def __init__(self, *, is_told: bool) -> None:
        super().__init__("the replica is lost")
        self.is_told = is_told


class Reply:
    """The sending half of an exchange."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_events = False
        self._rest = b""
        """Of an event whose end has not come: half of one is worse than none."""
        self.has_begun = False

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        left_out = _OF_A_CONNECTION | _OF_THE_SERVER
        kept = [(name.lower(), value) for name, value in headers if name.lower() not in left_out]
        self._is_events = any(name == b"content-type" and value.startswith(_EVENTS) for name, value in kept)
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, data: bytes) -> None:
        if self._is_events:
            data = self._rest + data
            end = data.rfind(_EVENT_END) + len(_EVENT_END) if _EVENT_END in data else 0
            data, self._rest = data[:end], data[end:]
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": self._rest, "more_body": False})

    async def break_off(self) -> None:
        """The replica is lost. A stream says so; of another reply that has begun the end is missing, which the server
        shows by closing the connection."""
        if self._is_events:
            self._rest = b""
            await self.write(event(replica_lost().body()) + DONE)
            await self.end()


async def pass_on(
    http: httpx.AsyncClient, replica: Replica, scope: Scope, receive: Receive | None, send: Send, content: Content
) -> None:
    """
    Args:
        receive: where the client's leaving is heard; None while it still sends the body.

    Raises:
        NotSentError: the replica has heard nothing of the request.
        RefusedError: it has, and has done nothing; only of a request that can be made again.
        ReplicaLostError: it has, and will not answer to the end.
        ClientDisconnect: the client left before there was a reply.
    """
    reply = Reply(send)
    exchange = asyncio.ensure_future(
        _exchange(http, _request(replica, scope, content), reply, isinstance(content, bytes))
    )
    lost = asyncio.ensure_future(replica.lost.wait())
    left = asyncio.ensure_future(_left(receive)) if receive is not None else None
    others = [task for task in (lost, left) if task is not None]
    try:
        await asyncio.wait({exchange, *others}, return_when=asyncio.FIRST_COMPLETED)
        if exchange.done():
            if exchange.result():
                return
        elif left is not None and left.done():
            if reply.has_begun:
                return
            raise ClientDisconnect
    finally:
        for task in (exchange, *others):
            task.cancel()
        await asyncio.gather(exchange, *others, return_exceptions=True)
    if not lost.cancelled():
        logger.warning("%s is lost to a request: it has been silent for too long", replica.name)
    await reply.break_off()
    raise ReplicaLostError(is_told=reply.has_begun)


async def _exchange(http: httpx.AsyncClient, request: httpx.Request, reply: Reply, may_be_repeated: bool) -> bool:
    """Whether there was an end. Raises NotSentError or RefusedError."""
    try:
        response = await http.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise NotSentError from None
    except httpx.TransportError as error:
        _log_lost(request, "before it answered", error)
        return False
    async with contextlib.aclosing(response):
        if NOT_BEGUN in response.headers and may_be_repeated:
            raise RefusedError
        names = ((b"x-neaptide-replica", request.extensions["replica"].encode()),)
        await reply.begin(response.status_code, (*response.headers.raw, *names))
        try:
            # As it comes from the socket: nothing is waited for that would make larger pieces of it.
            async for data in response.aiter_raw():
                await reply.write(data)
        except httpx.TransportError as error:
            _log_lost(request, "within its answer", error)
            return False
        await reply.end()
    return True


def _log_lost(request: httpx.Request, when: str, error: httpx.TransportError) -> None:
    """Without its path, which a client may have made up."""
    name = request.extensions["replica"]
    logger.warning("%s is lost to a request %s: %s: %s", name, when, type(error).__name__, error)


def _request(replica: Replica, scope: Scope, content: Content) -> httpx.Request:
    """As the client made it, but for its connection and for its id, which the reply will have."""
    left_out = {*_OF_A_CONNECTION, b"expect", b"host", b"x-request-id"}
    sent = Headers(scope=scope)
    if is_own(sent.get("origin", ""), sent.get("host", "")):
        left_out.add(b"origin")  # the replica has another name, and would take the gateway's own page for a foreign one
    if isinstance(content, bytes):
        left_out.add(b"content-length")  # it is counted
    headers = [(name, value) for name, value in scope["headers"] if name not in left_out]
    headers.append((b"x-request-id", str(scope["state"]["request_id"]).encode()))
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    # No client should send one, a server takes it for a character of the path, and no URL may have it so.
    url = httpx.URL(replica.url).copy_with(raw_path=target.replace(b"#", b"%23"))
    return httpx.Request(scope["method"], url, headers=headers, content=content, extensions={"replica": replica.name})


def replica_lost() -> UnavailableError:
    """What a client is told."""
    return UnavailableError("The replica that worked on this request is lost; try again.", code="replica_lost")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_as_it_comes(receive: Receive) -> AsyncIterator[bytes]:
    """Pieces of a request's body. Raises ClientDisconnect."""
    has_more = True
    while has_more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        has_more = message.get("more_body", False)
        if piece := message.get("body", b""):
            yield piece
