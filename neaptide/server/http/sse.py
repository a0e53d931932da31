"""Server-sent events, and the handling of disconnected clients."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neaptide.server.engine_client.client import EngineUnavailableError
from neaptide.server.http.errors import ApiError, UnavailableError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
"""Comment without an empty line: some clients take every empty line for the end of an event."""

CHUNKED_BODY = "chunked_body"
"""Key in a request's state: the ``ChunkedBody`` of its reply."""
_SEPARATORS = tuple((character.encode(), rb"\u%04x" % ord(character)) for character in "\x85\u2028\u2029")

_T = TypeVar("_T")


class ChunkedBody(Protocol):
    """Chunked body of a reply, for writes that need no task. A connection offers it next to ASGI's ``send``."""

    @property
    def can_write(self) -> bool:
        """Whether the reply has begun, has not ended, and its connection takes data at once."""
        ...

    def write(self, data: bytes) -> None:
        """Writes one chunk; ``data`` is not empty."""
        ...


def event(data: object, name: str = "") -> bytes:
    """One event with ``data`` as JSON, and with a name if the API names its events.

    Unicode's line separators are escaped: clients that split lines like Python's ``splitlines`` would see half an
    event.
    """
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + json_of(data) + b"\n\n"


def json_of(data: object) -> bytes:
    """JSON of a part of an event, with Unicode's line separators escaped."""
    encoded = msgspec.json.encode(data)
    if not encoded.isascii():
        for character, escaped in _SEPARATORS:
            encoded = encoded.replace(character, escaped)
    return encoded


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled if the client disconnects first.

    Raises:
        ClientDisconnect: it did.
    """
    listener = asyncio.ensure_future(_disconnect(receive))
    worker = asyncio.ensure_future(work)
    try:
        await asyncio.wait({listener, worker}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        await _cancel(listener, worker)


class EventStream(Response):
    """Sends ``events`` as they come, then ``[DONE]``.

    The status line waits for the first event, so an earlier error is a reply with its own status. If the first event
    takes longer than ``keep_alive_s``, the stream begins with a comment; 0 sends none. Later errors become error
    events: a stream that just ended would look like success.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            on_end: called at the end of the reply, even if no event was read.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        # A stream has no length; the base class set that of its empty body.
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._on_end = on_end
        self._output: Output | None = None

    def output_now(self) -> "Output | None":
        """Where events may be written past ``events``, without a task; the caller keeps the order. None if the stream
        has not begun, has ended, or its connection takes no data at once."""
        output = self._output
        return output if output is not None and output.can_write_now else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = scope.get("state", {}).get(CHUNKED_BODY)
        output = self._output = Output(send, self.status_code, self.raw_headers, body)
        keepers = [asyncio.ensure_future(output.keep_alive(self._keep_alive_s))] if self._keep_alive_s else []
        try:
            await unless_disconnected(receive, self._write(output))
        except ClientDisconnect:
            # The client has disconnected, and no handler could start another reply.
            if not output.started:
                raise
        except asyncio.CancelledError:
            # The server's drain timeout is over. Without this event the end would look like a network fault.
            if output.started:
                error = UnavailableError("The server is shutting down.", code="server_shutdown")
                with contextlib.suppress(OSError):
                    await output.write(event(error.body()))
                    await output.finish()
            raise
        finally:
            self._on_end()
            await _cancel(*keepers)

    async def _write(self, output: "Output") -> None:
        try:
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    await output.write(data)
        except (ApiError, EngineUnavailableError) as error:
            if not output.started:
                raise
            await output.write(event(_as_api_error(error).body()))
        except OSError:
            raise ClientDisconnect from None
        except Exception:
            if not output.started:
                raise
            logger.exception("a stream failed")
            await output.write(event(ApiError("Internal server error.", code="internal_error").body()))
        await output.finish()


class Output:
    """Sending side of one stream. The lock keeps keep-alive comments out of the middle of an event."""

    def __init__(
        self, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: "ChunkedBody | None" = None
    ) -> None:
        self._send = send
        self._body = body
        self._status = status
        self._headers = headers
        self._lock = asyncio.Lock()
        self._last_s = asyncio.get_running_loop().time()
        self._is_finished = False
        self.started = False

    async def write(self, data: bytes) -> None:
        async with self._lock:
            await self._write(data)

    @property
    def can_write_now(self) -> bool:
        is_open = self.started and not self._is_finished and not self._lock.locked()
        return is_open and self._body is not None and self._body.can_write

    def write_now(self, data: bytes) -> None:
        """Writes at once; call it only while ``can_write_now``."""
        if self._body is None:
            raise RuntimeError("the stream takes no data now")
        self._body.write(data)
        self._last_s = asyncio.get_running_loop().time()

    async def finish(self) -> None:
        async with self._lock:
            await self._write(DONE)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._is_finished = True

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_s = asyncio.get_running_loop().time()

    async def keep_alive(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait_s = self._last_s + interval_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                async with self._lock:
                    if self._is_finished:
                        return
                    await self._write(KEEP_ALIVE)


def _as_api_error(error: ApiError | EngineUnavailableError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return UnavailableError("The engine stopped while it processed this request; try again.")


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
