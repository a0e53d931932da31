"""Forwards one exchange to a replica, and streams the reply back."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable

import httpx
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from neaptide.cluster.gateway.replicas import Replica
from neaptide.server.http.errors import NOT_BEGUN, UnavailableError
from neaptide.server.http.forwarding import OF_A_CONNECTION, OF_THE_SERVER, until_left, without
from neaptide.server.http.hosts import is_own
from neaptide.server.http.sse import DONE, event

logger = logging.getLogger(__name__)

_EVENTS = b"text/event-stream"
_EVENT_END = b"\n\n"

Content = bytes | AsyncIterator[bytes]


class NotSentError(Exception):
    """The replica did not take the connection, so another one may get the request."""


class RefusedError(Exception):
    """The replica is stopping and takes no new work, so another one may get the request."""


class ReplicaLostError(Exception):
    """The replica went away or stopped answering. ``is_told``: a reply had begun, and the client was sent an error or
    sees the reply cut off."""

    def __init__(self, *, is_told: bool) -> None:
        super().__init__("the replica is lost")
        self.is_told = is_told


class ReplicaReply:
    """The sending half of an exchange."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_events = False
        self._rest = b""
        """Incomplete event, kept until its end arrives, because clients cannot parse half an event."""
        self.has_begun = False

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        kept = without(headers, OF_A_CONNECTION | OF_THE_SERVER)
        self._is_events = any(name == b"content-type" and value.startswith(_EVENTS) for name, value in kept)
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def write(self, data: bytes) -> None:
        if self._is_events:
            data = self._rest + data
            end = data.rfind(_EVENT_END) + len(_EVENT_END) if _EVENT_END in data else 0
            while data.startswith(b":", end) and (line_end := data.find(b"\n", end)) >= 0:
                end = line_end + 1  # A comment is no part of an event, and keeps the connection alive.
            data, self._rest = data[:end], data[end:]
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": self._rest, "more_body": False})

    async def break_off(self) -> None:
        """Ends a reply after its replica was lost. A stream gets an error event. Any other reply stays incomplete, so
        the server closes the connection."""
        if self._is_events:
            self._rest = b""
            await self.write(event(replica_lost().body()) + DONE)
            await self.end()


async def pass_on(
    http: httpx.AsyncClient, replica: Replica, scope: Scope, receive: Receive | None, send: Send, content: Content
) -> None:
    """Forwards one request and its reply.

    Args:
        receive: receives the client's disconnect; None while the client still sends the body.

    Raises:
        NotSentError: the replica got nothing of the request.
        RefusedError: the replica got the request and did not begin it; raised only if the request can be repeated.
        ReplicaLostError: the replica got the request, and will not answer it in full.
        ClientDisconnect: the client left before a reply began.
    """
    reply = ReplicaReply(send)
    exchange = asyncio.ensure_future(
        _exchange(http, _request(replica, scope, content), reply, isinstance(content, bytes))
    )
    lost = asyncio.ensure_future(replica.lost.wait())
    left = asyncio.ensure_future(until_left(receive)) if receive is not None else None
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
        logger.warning("%s lost a request: it has not answered for too long", replica.name)
    await reply.break_off()
    raise ReplicaLostError(is_told=reply.has_begun)


async def _exchange(
    http: httpx.AsyncClient, request: httpx.Request, reply: ReplicaReply, may_be_repeated: bool
) -> bool:
    """Whether the reply was sent to its end. Raises NotSentError or RefusedError."""
    try:
        response = await http.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise NotSentError from None
    except httpx.TransportError as error:
        _log_lost(request, "before its answer", error)
        return False
    async with contextlib.aclosing(response):
        if NOT_BEGUN in response.headers and may_be_repeated:
            raise RefusedError
        names = ((b"x-neaptide-replica", request.extensions["replica"].encode()),)
        await reply.begin(response.status_code, (*response.headers.raw, *names))
        try:
            # Raw pieces from the socket, sent on at once: a larger buffer would delay tokens.
            async for data in response.aiter_raw():
                await reply.write(data)
        except httpx.TransportError as error:
            _log_lost(request, "during its answer", error)
            return False
        await reply.end()
    return True


def _log_lost(request: httpx.Request, when: str, error: httpx.TransportError) -> None:
    """Logs a lost request without its path, which a client may have made up."""
    name = request.extensions["replica"]
    logger.warning("%s lost a request %s: %s: %s", name, when, type(error).__name__, error)


def _request(replica: Replica, scope: Scope, content: Content) -> httpx.Request:
    """The client's request for a replica. It leaves out connection headers, and has the request id of the reply."""
    left_out = {*OF_A_CONNECTION, b"expect", b"host", b"x-request-id"}
    sent = Headers(scope=scope)
    if is_own(sent.get("origin", ""), sent.get("host", "")):
        left_out.add(
            b"origin"
        )  # the replica has another host name, and would take the gateway's own page for a foreign one
    if isinstance(content, bytes):
        left_out.add(b"content-length")  # httpx sets it
    headers = without(scope["headers"], left_out)
    headers.append((b"x-request-id", str(scope["state"]["request_id"]).encode()))
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    # A server takes "#" for a character of the path, but no URL may contain it there.
    url = httpx.URL(replica.url).copy_with(raw_path=target.replace(b"#", b"%23"))
    return httpx.Request(scope["method"], url, headers=headers, content=content, extensions={"replica": replica.name})


def replica_lost() -> UnavailableError:
    """The client's error."""
    return UnavailableError("The replica that worked on this request is lost; try again.", code="replica_lost")
