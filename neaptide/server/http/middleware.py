"""Outermost middleware: checks target, ``Host`` and origin of a request; adds a request id and measures its time."""

import asyncio
import re
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neaptide.server.http.auth import OPEN_PATHS
from neaptide.server.http.error_replies import error_response
from neaptide.server.http.errors import (
    ApiError,
    HeadersTooLargeError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from neaptide.server.http.hosts import HostFilter, OriginFilter
from neaptide.server.observe.metrics_http import HttpMetrics

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10
"""The parser has this limit too, but only for incomplete headers: the last read may exceed it."""
ARRIVAL_S = "arrival_s"
"""Key in a request's state: ``CLOCK_MONOTONIC`` second at which its last byte reached this machine."""
PROBES_ONLY = "probes_only"
"""Key in a request's state: its connection is above the cap, so only probes and metrics are allowed."""
_CLIENT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ABSOLUTE_FORM = re.compile(rb"(?i)https?://([^/?#@\\\s]+)(/.*)?")
_END = {"Connection": "close"}


class EdgeMiddleware:
    """Outermost of our middlewares. It is pure ASGI, so that disconnects reach the routes."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        clock: Callable[[], float],
        hosts: HostFilter | None = None,
        cors_origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._hosts = hosts
        self._origins = OriginFilter(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _take_absolute_form(scope)
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
            if (refusal := self._refusal(scope, headers)) is not None:
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

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Error for a request that is refused before routing; None accepts it."""
        if _too_large(scope["headers"]):
            return HeadersTooLargeError("The request headers are too large.", headers=_END)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may have found another end of this body, so the rest of the connection cannot be trusted.
            text = "Content-Length and Transfer-Encoding exclude each other."
            return InvalidRequestError(text, code="invalid_http", headers=_END)
        if self._hosts is not None and not self._hosts.admits(headers.get("host")):
            text = "The Host header is none of this server's names. Add the name with --allowed-hosts, or set API keys."
            return InvalidRequestError(text, code="unknown_host")
        if scope["state"].get(PROBES_ONLY) and scope["path"] not in OPEN_PATHS:
            self._metrics.on_ended("refused")
            crowded = OverloadedError(online=True, retry_after_s=1)
            crowded.headers |= _END
            return crowded
        return self._origins.refusal(scope["method"], headers)


def new_request_id() -> str:
    """An id for a request without an id of the client."""
    return f"req_{uuid.uuid4().hex}"


def _take_absolute_form(scope: Scope) -> None:
    """Accepts an absolute target, ``http://host/path``, as proxies get it. Its host replaces the header's.

    RFC 9112, 3.2.2.
    """
    found = _ABSOLUTE_FORM.fullmatch(scope.get("raw_path", b""))
    if found is None:
        return
    raw_path = found[2] or b"/"
    scope["raw_path"], scope["path"] = raw_path, unquote(raw_path.decode("ascii"))
    scope["headers"] = [(b"host", found[1]), *((name, value) for name, value in scope["headers"] if name != b"host")]


def _too_large(headers: list[tuple[bytes, bytes]]) -> bool:
    num_bytes = sum(len(name) + len(value) + len(": \r\n") for name, value in headers)
    return len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES


def _request_id(from_client: str | None) -> str:
    if from_client is not None and _CLIENT_ID.fullmatch(from_client):
        return from_client
    return new_request_id()
