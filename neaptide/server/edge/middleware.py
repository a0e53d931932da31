"""What surrounds every exchange: the ``Host`` that it names, a request id on the reply, its time and status."""

import asyncio
import re
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neaptide.server.edge.errors import HeadersTooLargeError, InvalidRequestError, UnavailableError, error_response
from neaptide.server.edge.hosts import HostFilter
from neaptide.server.observe.metrics import ServerMetrics

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10
"""The parser has the same limit, but holds it against incomplete headers only: the last read may go beyond."""
_CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class EdgeMiddleware:
    """Outermost of ours; pure ASGI, so that disconnects reach the routes."""

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, clock: Callable[[], float], hosts: HostFilter | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        start_s = self._clock()
        status, started = 500, False

        async def send_stamped(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                stamped = MutableHeaders(scope=message)
                stamped["x-request-id"] = request_id
                stamped["openai-processing-ms"] = str(round((self._clock() - start_s) * 1000))
            await send(message)

        try:
            if _too_large(scope["headers"]):
                error = HeadersTooLargeError("The request headers are too large.", headers={"Connection": "close"})
                await error_response(error)(scope, receive, send_stamped)
            elif self._hosts is not None and not self._hosts.admits(headers.get("host")):
                refusal = InvalidRequestError("The Host header is none of this server's names.", code="unknown_host")
                await error_response(refusal)(scope, receive, send_stamped)
            else:
                await self._app(scope, receive, send_stamped)
        except asyncio.CancelledError:
            if not started:
                cut = UnavailableError("The server is shutting down.", code="server_shutdown")
                await error_response(cut)(scope, receive, send_stamped)
            raise
        finally:
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._metrics.on_http(scope["method"], route, status, self._clock() - start_s)


def new_request_id() -> str:
    """An id for a reply to a client that sent none of its own."""
    return f"req_{uuid.uuid4().hex}"


def _too_large(headers: list[tuple[bytes, bytes]]) -> bool:
    num_bytes = sum(len(name) + len(value) + len(": \r\n") for name, value in headers)
    return len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES


def _request_id(from_client: str | None) -> str:
    if from_client is not None and _CLIENT_ID.fullmatch(from_client):
        return from_client
    return new_request_id()
