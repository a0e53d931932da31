"""Limits of a connection: deadlines, sizes and a cap. Wraps uvicorn's h11 protocol, which has none of them.

 a new connection    sends something within ``header_s``
 request headers     are complete ``header_s`` after their first byte
 request body        never pauses longer than ``body_idle_s``, and keeps a minimum rate
 reply               never pauses longer than ``write_idle_s`` while there is something to send
 next request        comes within uvicorn's keep-alive time

A connection that misses one gets 408 if no reply has begun, and is closed. After an early reply (413, say) the client
may go on sending for ``linger_s``: closing at once would reset the connection and lose the reply. The reply to a
request with ``Connection: close`` or of HTTP/1.0 closes at once. Unread data is then lost, and so is the reply if the
reset comes first.

Above the cap the connection that has been idle longest is closed: one that waits between two requests, or has sent
nothing for ``silence_s``. If none is idle, a few more may ask for probes and metrics, so that a full server does not
look like a dead one.

uvicorn has no interface for this. ``BoundedH11Protocol`` builds on the attributes and the order of calls of its h11
protocol, so ``pyproject.toml`` accepts only the minor version that the tests have passed with.
"""

import asyncio
import http
import json
import re
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from neaptide.server.http.errors import (
    ApiError,
    HeadersTooLargeError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
)
from neaptide.server.http.middleware import ARRIVAL_S, PROBES_ONLY, new_request_id
from neaptide.server.http.own_waits import OWN_WAIT, OwnWait, OwnWaits
from neaptide.server.http.sse import CHUNKED_BODY
from neaptide.server.observe.metrics_http import HttpMetrics
from neaptide.server.openai.endpoints import ENDPOINTS

MAX_READ_BYTES = 16 << 10
"""Bytes processed at once. A body of tiny chunks costs 10 us per chunk and blocks other connections meanwhile."""
MAX_UNSENT_BYTES = 16 << 10
"""Unsent bytes in the kernel, per connection. One more message waits here: the next ``send`` waits until it is gone."""
_LAST_DATA_RECEIVED = 52
"""Offset of ``tcpi_last_data_recv``, milliseconds as uint32, in the kernel's ``struct tcp_info``."""
_TCP_INFO_BYTES = _LAST_DATA_RECEIVED + 4
_CHAT = re.compile(rb"POST (%b)[? ]" % b"|".join(re.escape(path.encode()) for path in ENDPOINTS))
_LENGTH = re.compile(rb"^content-length:[ \t]*([^\r\n]*?)[ \t]*\r?$", re.MULTILINE)
PROBE_CONNECTIONS = 16
"""Connections above the cap for probes and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Limits of connections; seconds are real time. See the module's table."""

    max_connections: int = 4096
    silence_s: float = 1.0
    """Time after which a new connection without data counts as idle."""
    header_s: float = 10.0
    body_idle_s: float = 30.0
    min_body_rate_bytes_per_s: float = 500.0
    """Least average rate over the body, after a first ``body_idle_s``."""
    write_idle_s: float = 30.0
    linger_s: float = 30.0
    """Longest time for the rest of a body that was replied to early."""
    farewell_s: float = 1.0
    """Time between the server's last byte and its close of a connection."""


class _ChunkedBody:
    """Body of one reply in chunks, past the parser, which keeps no state for them. Implements ``ChunkedBody``."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def can_write(self) -> bool:
        cycle = self._cycle
        has_ended = cycle.response_complete or cycle.disconnected
        return cycle.response_started and not has_ended and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class BoundedH11Protocol(H11Protocol):
    """One connection, with limits. Made by ``protocol_class``."""

    limits: TransportLimits
    metrics: HttpMetrics
    waits: OwnWaits | None
    """For servers that refuse chats which would wait for too long."""
    idle: "dict[BoundedH11Protocol, float]"
    """Idle connections of the server, and the time from which each may be closed; roughly in the order of that time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timer: asyncio.TimerHandle | None = None
        self._read_due_s: float | None = None
        self._write_due_s: float | None = None
        self._waiting_for = "request"
        """What ``_read_due_s`` is a deadline for; also the label of the metric."""
        self._body_due_s = 0.0
        self._unsent_bytes = 0
        self._own_wait: OwnWait | None = None
        super().connection_made(transport)
        self.metrics.connections.inc()
        _prepare_socket(transport)
        if len(self.connections) > self.limits.max_connections and not self._make_room():
            if len(self.connections) > self.limits.max_connections + PROBE_CONNECTIONS:
                self._leave(OverloadedError(online=True, retry_after_s=1), "refused")
                return
            self.app_state = {**self.app_state, PROBES_ONLY: True}
        self.idle[self] = self.loop.time() + self.limits.silence_s
        self._expect("request", self.limits.header_s)

    def _unsupported_upgrade_warning(self) -> None:
        """Suppresses the warning: clients that offer HTTP/2 with every request, as Java's do, are served with
        HTTP/1.1."""

    def _make_room(self) -> bool:
        """Closes the connection that has been idle longest; returns False if none is idle."""
        now_s = self.loop.time()
        longest = next((connection for connection, since_s in self.idle.items() if since_s <= now_s), None)
        if longest is not None:
            longest._count("idle")
            longest.transport.abort()
            del self.idle[longest]
        return longest is not None

    def connection_lost(self, exc: Exception | None) -> None:
        self.metrics.connections.dec()
        self.idle.pop(self, None)
        self._end_own_wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)
        # After a reset, uvicorn would keep everything of this connection for a minute.
        self._unset_keepalive_if_required()

    # ---- reading ----

    def data_received(self, data: bytes) -> None:
        if self._waiting_for == "farewell":
            return
        self.idle.pop(self, None)
        state_before, cycle_before = self.conn.their_state, self.cycle
        if state_before is h11.IDLE and self.waits is not None and self._is_refused(self.waits, data):
            return
        super().data_received(data)
        if self._waiting_for == "farewell":
            return
        if self.cycle is not None and (self.cycle is not cycle_before or state_before is h11.SEND_BODY):
            self._describe(self.cycle)
        if self.conn.their_state is h11.SEND_BODY:
            self._on_body(len(data), has_begun=state_before is not h11.SEND_BODY or self.cycle is not cycle_before)
        elif self.conn.their_state is not h11.IDLE:
            self._read_due_s = None
        elif self._waiting_for == "linger" and not self.conn.trailing_data[0]:
            self._rest()
        elif self._waiting_for != "header":
            self._expect("header", self.limits.header_s)

    def _describe(self, cycle: RequestResponseCycle) -> None:
        """Adds to the state of a request what the routes may use of this connection."""
        state = cycle.scope["state"]
        if self.conn.their_state is not h11.SEND_BODY:
            state[ARRIVAL_S] = arrival_s = self._arrival_s()
            if self.waits is not None and cycle.scope["path"] in ENDPOINTS and not cycle.response_complete:
                state[OWN_WAIT] = self._own_wait = self.waits.enter(arrival_s)
        # The body of other replies may have another form.
        if cycle.scope["method"] == "POST" and cycle.scope["http_version"] == "1.1":
            state.setdefault(CHUNKED_BODY, _ChunkedBody(cycle))

    def _arrival_s(self) -> float:
        """When the last bytes came."""
        return self.loop.time() - waited_s(self.transport.get_extra_info("socket"))

    def _is_refused(self, waits: OwnWaits, data: bytes) -> bool:
        """Refuses a chat that would wait for too long, before it is parsed."""
        chat = _CHAT.match(data)
        if chat is None:
            return False
        try:
            waits.check(self._arrival_s())
        except OverloadedError as error:
            waits.on_refused(chat[1].decode(), self._refuse(error, data))
            return True
        return False

    def _refuse(self, error: ApiError, data: bytes) -> str:
        """Refuses a request that is not parsed; returns the reply's id.

        If it has come whole, its connection stays: a new one would cost more than the refusal.
        """
        if self.conn.trailing_data[0] or not _is_whole(data):
            return self._leave(error, "refused")
        request_id = new_request_id()
        self._unset_keepalive_if_required()
        self.transport.write(_reply(error, request_id))
        self._rest()
        return request_id

    def _end_own_wait(self) -> None:
        if self._own_wait is not None:
            self._own_wait.leave()
            self._own_wait = None

    def _rest(self) -> None:
        """Waits between two requests: only uvicorn's keep-alive timer runs, which every byte stops."""
        self._waiting_for, self._read_due_s = "", None
        self._note_rest()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _on_body(self, num_bytes: int, *, has_begun: bool) -> None:
        if self._waiting_for == "linger" and not has_begun:
            return
        now_s = self.loop.time()
        if has_begun:
            self._body_due_s = now_s + self.limits.body_idle_s
        else:
            self._body_due_s += num_bytes / self.limits.min_body_rate_bytes_per_s
        self._expect("body", min(self.limits.body_idle_s, self._body_due_s - now_s))

    def on_response_complete(self) -> None:
        cycle = self.cycle
        self._end_own_wait()
        super().on_response_complete()  # This may begin the next request, if it has been sent already.
        if self._waiting_for == "farewell":
            return
        self._waiting_for, self._read_due_s = "", None
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:
            if self.cycle is cycle:
                self._expect("linger", self.limits.linger_s)
            else:
                self._on_body(0, has_begun=True)
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._expect("header", self.limits.header_s)
        else:
            self._note_rest()

    def _note_rest(self) -> None:
        """Marks the connection as idle if it waits for another request and has nothing left to send."""
        has_replied = self.cycle is None or self.cycle.response_complete
        if has_replied and self.conn.their_state is h11.IDLE and self._write_due_s is None:
            self.idle[self] = self.loop.time()

    # ---- writing ----

    def pause_writing(self) -> None:
        """Called whenever the kernel did not take all, because the transport's own buffer has no allowance."""
        super().pause_writing()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_due_s = self.loop.time() + self.limits.write_idle_s
        self._arm()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_due_s = None
        if self._waiting_for == "":
            self._note_rest()

    # ---- deadlines ----

    def _expect(self, what: str, within_s: float) -> None:
        self._waiting_for = what
        self._read_due_s = self.loop.time() + within_s
        self._arm()

    def _arm(self) -> None:
        """Sets the timer. It stays if the deadline moves later: it checks again when it fires."""
        due_s = min(due for due in (self._read_due_s, self._write_due_s) if due is not None)
        if self._timer is not None and self._timer.when() > due_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_s = self.loop.time()
        if self._write_due_s is not None and self._write_due_s <= now_s:
            self._on_write_due(now_s)
        elif self._read_due_s is not None and self._read_due_s <= now_s:
            self._on_read_due()
        if self._read_due_s is not None or self._write_due_s is not None:
            self._arm()

    def _on_write_due(self, now_s: float) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes < self._unsent_bytes:
            self._unsent_bytes = unsent_bytes
            self._write_due_s = now_s + self.limits.write_idle_s
            return
        self._write_due_s = None
        # Otherwise the kernel would go on offering data to a peer that takes nothing.
        peer = cast("socket.socket", self.transport.get_extra_info("socket"))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._cut("slow_reader")

    def _on_read_due(self) -> None:
        reason, self._read_due_s = self._waiting_for, None
        if reason == "body" and self.flow.read_paused:
            # The server itself paused reading.
            self._on_body(0, has_begun=True)
        elif reason in ("farewell", "linger"):
            self._cut(reason)
        else:
            self._leave(RequestTimeoutError("The request did not arrive in time."), reason)

    # ---- the end ----

    def send_400_response(self, msg: str) -> None:
        """Replaces uvicorn's reply to invalid HTTP; called while the parser's error is handled."""
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._leave(HeadersTooLargeError("The request headers are too large."), "malformed")
        else:
            self._leave(InvalidRequestError("The request is not valid HTTP.", code="invalid_http"), "malformed")

    def shutdown(self) -> None:
        if self._waiting_for == "farewell":
            self.transport.abort()
        else:
            super().shutdown()

    def _leave(self, error: ApiError, reason: str) -> str:
        """Sends the error if no reply has begun, and closes the connection soon; see ``linger_s`` for why not now.

        Returns the reply's id.
        """
        request_id = new_request_id()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._cut(reason)
            return request_id
        self._count(reason)
        self.idle.pop(self, None)
        self._unset_keepalive_if_required()
        self.transport.write(_reply(error, request_id, {"Connection": "close"}))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()  # The data is discarded.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._expect("farewell", self.limits.farewell_s)
        return request_id

    def _cut(self, reason: str) -> None:
        if reason != "farewell":
            self._count(reason)
        self._read_due_s = self._write_due_s = None
        self.transport.abort()

    def _count(self, reason: str) -> None:
        self.metrics.on_ended(reason)


def protocol_class(
    transport_limits: TransportLimits, server_metrics: HttpMetrics, own_waits: OwnWaits | None = None
) -> type[BoundedH11Protocol]:
    """The protocol class for ``uvicorn.Config(http=...)``, which makes the protocols itself."""

    class Protocol(BoundedH11Protocol):
        limits = transport_limits
        metrics = server_metrics
        waits = own_waits
        idle = {}

    return Protocol


def waited_s(peer: socket.socket) -> float:
    """Time that the last bytes of a connection have waited in the kernel; 0.0 if the kernel does not say.

    A busy process reads a request long after it came, and accepts its connection even later.
    """
    if sys.platform != "linux":
        return 0.0
    try:
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # Not a TCP connection.
        return 0.0
    if len(info) < _TCP_INFO_BYTES:
        return 0.0
    (last_data_ms,) = struct.unpack_from("I", info, _LAST_DATA_RECEIVED)
    return float(last_data_ms) / 1e3


def _prepare_socket(transport: asyncio.Transport) -> None:
    transport.set_write_buffer_limits(high=0)
    if hasattr(transport, "max_size"):
        transport.max_size = MAX_READ_BYTES
    peer = cast("socket.socket", transport.get_extra_info("socket"))
    if peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # asyncio does this only for sockets whose protocol was named. Otherwise a body waits 40 ms after its headers.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # This bounds only unsent data. Data in flight may be more, so distance costs no throughput.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def _is_whole(data: bytes) -> bool:
    """Whether the bytes are one request of HTTP/1.1 with its whole body, after which the connection may stay."""
    head, end, body = data.partition(b"\r\n\r\n")
    line, _, fields = head.lower().partition(b"\r\n")
    lengths = _LENGTH.findall(fields)
    is_plain = line.endswith(b" http/1.1") and b"transfer-encoding" not in fields and b"close" not in fields
    return bool(end) and is_plain and lengths == [b"%d" % len(body)]


def _reply(error: ApiError, request_id: str, more: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """A whole reply made by hand, because the parser's state allows none or knows no request yet."""
    content = json.dumps(error.body()).encode()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "x-request-id": request_id,
        **more,
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content
