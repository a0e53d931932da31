"""Streams requests to an OpenAI-compatible server and times them at the client.

It uses aiohttp, because the client's own time adds to every measured latency; httpx takes almost three times as long.
aiohttp is imported when a client is made, so that other commands and servers do not wait for it.
"""

import asyncio
import contextlib
import gc
import io
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx
import msgspec

from neaptide.loadgen.client.proxies import is_loopback
from neaptide.loadgen.client.recorder import ChatRecord

if TYPE_CHECKING:
    import aiohttp

KEEP_ALIVE_S = 4.0
"""Less than the 5 s after which many servers close a connection, perhaps just when it is reused."""
CLOSE_S = 1.0
"""Limit for closing connections: one whose server reads nothing more would never end."""
OF_HTTPX = frozenset({"accept", "accept-encoding", "connection", "user-agent"})
"""Headers with which httpx describes itself."""
LARGE_BYTES = 1 << 20
"""aiohttp warns about larger bodies that are not files."""


class StreamClient:
    """A client of one server and one model.

    It is a context manager, because it keeps connections: as many as there are requests in flight.

    Args:
        url: the server's root, or the part before ``/v1``.
        headers: sent with every request.
        timeout_s: to connect, and to wait for the next piece of an answer; None waits for ever.
        keep_alive_s: how long a connection waits for its next request; 0 uses a connection per request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._headers = {**(headers or {}), "content-type": "application/json"}
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def beside(cls, http: httpx.AsyncClient, model: str) -> "StreamClient":
        """A client of the same server as ``http``, with the same headers and time-out."""
        headers = {name: value for name, value in http.headers.items() if name not in OF_HTTPX}
        return cls(str(http.base_url), model, headers=headers, timeout_s=http.timeout.read)

    async def __aenter__(self) -> "StreamClient":
        import aiohttp

        how: dict[str, Any] = {"keepalive_timeout": self._keep_alive_s} if self._keep_alive_s else {"force_close": True}
        if urlsplit(self._url).scheme == "https":
            how["ssl"] = httpx.create_ssl_context()  # trust the same authorities as httpx
            how["ssl"].set_alpn_protocols(["http/1.1"])
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, **how),
            headers=self._headers,
            proxy=_proxy_of(self._url),
            timeout=aiohttp.ClientTimeout(connect=self._timeout_s, sock_read=self._timeout_s),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._session is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._session.close()
        self._session = None

    async def chat(
        self, messages: Sequence[dict[str, str]], max_tokens: int, *, cancel_after_s: float | None = None, **fields: Any
    ) -> ChatRecord:
        body = {"messages": list(messages), "max_completion_tokens": max_tokens, "temperature": 0} | fields
        return await self._stream("/v1/chat/completions", body, cancel_after_s)

    async def complete(
        self, prompt: str | list[int], max_tokens: int, *, cancel_after_s: float | None = None, **fields: Any
    ) -> ChatRecord:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        return await self._stream("/v1/completions", body, cancel_after_s)

    async def _stream(self, path: str, body: dict[str, Any], cancel_after_s: float | None) -> ChatRecord:
        """Streams one answer. Every failure is recorded in ``Record.error``; only outside cancellation raises.

        The client itself disconnects after ``cancel_after_s``.
        """
        import aiohttp

        now = asyncio.get_running_loop().time
        record = ChatRecord(sent_s=now())
        body = body | {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        patience = asyncio.timeout(cancel_after_s)
        try:
            async with patience:
                await self._read(path, body, record)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # A server that is silent for too long also raises TimeoutError, which is not the client's own cancellation.
            if patience.expired():
                record.cancelled = True
            else:
                record.error = f"{type(error).__name__}: {error}"
        if record.error is None and record.finish_reason is None and not record.cancelled:
            record.error = "the stream ended without a finish_reason"
        record.end_s = now()
        return record

    async def _read(self, path: str, body: dict[str, Any], record: ChatRecord) -> None:
        assert self._session is not None, "used outside of its context"
        now = asyncio.get_running_loop().time
        content = msgspec.json.encode(body)
        data = io.BytesIO(content) if len(content) > LARGE_BYTES else content
        async with self._session.post(self._url + path, data=data, allow_redirects=False) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.read()).decode(errors='replace')[:200]}"
                return
            rest = bytearray()
            # Not line by line: aiohttp rejects lines over 512 KiB, and log-probabilities may be longer.
            async for piece in response.content.iter_any():
                now_s = now()
                rest += piece
                if b"\n" in piece:
                    *lines, last = bytes(rest).split(b"\n")
                    for line in lines:
                        _take(line, record, now_s)
                    rest = bytearray(last)
            _take(bytes(rest), record, now())


def _take(line: bytes, record: ChatRecord, now_s: float) -> None:
    """Handles a line of the stream. Raises ValueError for data that is not a chunk."""
    if not line.startswith(b"data:"):
        return
    text = line[5:].strip()
    if text in (b"", b"[DONE]"):
        return
    try:
        record.add_chunk(_decoded(text), now_s)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a chunk of a stream: {text.decode(errors='replace')[:200]}") from error


def _decoded(text: bytes) -> Any:
    """Decodes JSON. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(text.decode(errors="replace"))  # accepts NaN and broken characters, and reports positions


def _proxy_of(url: str) -> str | None:
    """The proxy from the environment, as httpx reads it; none on loopback. aiohttp would look it up for every request,
    in a thread."""
    parts, proxies = urlsplit(url), getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found or is_loopback(url) or proxy_bypass(parts.hostname or ""):
        return None
    return found if "://" in found else f"http://{found}"


def poisson_arrivals(rate_rps: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times in [0, duration_s), in seconds."""
    rng = random.Random(seed)
    arrivals, t_s = [], rng.expovariate(rate_rps)
    while t_s < duration_s:
        arrivals.append(t_s)
        t_s += rng.expovariate(rate_rps)
    return arrivals


@contextlib.contextmanager
def heap_left_alone() -> Iterator[None]:
    """Excludes existing objects from garbage collection in this context.

    Scanning what a benchmark has imported takes a tenth of a second or more, which would delay every answer at that
    moment.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def open_loop(
    arrivals_s: Sequence[float],
    send: Callable[[int], Awaitable[ChatRecord]],
    on_record: Callable[[int, ChatRecord], None],
) -> None:
    """Sends request i at ``arrivals_s[i]``, independently of the others. Returns when all have ended.

    Cancelling it cancels the requests in flight.
    """
    now = asyncio.get_running_loop().time
    with heap_left_alone():
        start_s = now()

        async def one(index: int) -> None:
            await asyncio.sleep(max(0.0, start_s + arrivals_s[index] - now()))
            record = await send(index)
            record.arrival_s = arrivals_s[index]
            record.due_s = start_s + arrivals_s[index]
            on_record(index, record)

        async with asyncio.TaskGroup() as group:
            for index in range(len(arrivals_s)):
                group.create_task(one(index))


async def closed_loop(
    count: int,
    users: int,
    think_s: float,
    send: Callable[[int], Awaitable[ChatRecord]],
    on_record: Callable[[int, ChatRecord], None],
) -> None:
    """Runs ``users`` users. Each sends the next of ``count`` requests ``think_s`` after its previous answer.

    A slow server gets fewer requests, so times count from the sending of each request.
    """
    now = asyncio.get_running_loop().time
    indices = iter(range(count))
    with heap_left_alone():
        start_s = now()

        async def user() -> None:
            for index in indices:
                record = await send(index)
                record.arrival_s = record.sent_s - start_s
                on_record(index, record)
                await asyncio.sleep(think_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(users, count)):
                group.create_task(user())
