"""Streaming requests against an OpenAI-compatible server, timed at the client.

With aiohttp, for what the client itself takes is in every latency that it measures: httpx takes almost three times as
long. It is imported where a client is made: commands and servers that stream nothing need not wait for it.
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

from neaptide.loadgen.client.recorder import Record

if TYPE_CHECKING:
    import aiohttp

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which many servers end a connection, perhaps just when it is asked on again."""
CLOSE_S = 1.0
"""For connections to end: one whose server reads nothing more would never."""
OF_HTTPX = frozenset({"accept", "accept-encoding", "connection", "user-agent"})
"""What a client of httpx says of itself."""
LARGE_BYTES = 1 << 20
"""aiohttp warns of a body above it that is not a file."""


class StreamClient:
    """One server, one model. A context manager, for it keeps connections: as many as requests are in flight.

    Args:
        url: the server's root, or what stands before ``/v1``.
        headers: of every request.
        timeout_s: to connect, and to wait for the next piece of an answer; None is for ever.
        keep_alive_s: for which a connection waits for its next request; 0 is one request each.
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
        """For the same server, with the same headers and patience."""
        headers = {name: value for name, value in http.headers.items() if name not in OF_HTTPX}
        return cls(str(http.base_url), model, headers=headers, timeout_s=http.timeout.read)

    async def __aenter__(self) -> "StreamClient":
        import aiohttp

        how: dict[str, Any] = {"keepalive_timeout": self._keep_alive_s} if self._keep_alive_s else {"force_close": True}
        if urlsplit(self._url).scheme == "https":
            how["ssl"] = httpx.create_ssl_context()  # the same authorities are trusted
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
    ) -> Record:
        body = {"messages": list(messages), "max_completion_tokens": max_tokens, "temperature": 0} | fields
        return await self._stream("/v1/chat/completions", body, cancel_after_s)

    async def complete(
        self, prompt: str | list[int], max_tokens: int, *, cancel_after_s: float | None = None, **fields: Any
    ) -> Record:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        return await self._stream("/v1/completions", body, cancel_after_s)

    async def _stream(self, path: str, body: dict[str, Any], cancel_after_s: float | None) -> Record:
        """Every way to fail ends in ``Record.error``; only cancellation from outside leaves early. After
        ``cancel_after_s`` the client itself hangs up."""
        import aiohttp

        now = asyncio.get_running_loop().time
        record = Record(sent_s=now())
        body = body | {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        patience = asyncio.timeout(cancel_after_s)
        try:
            async with patience:
                await self._read(path, body, record)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # A server that is silent for too long is a TimeoutError as well, and no wish of the client's.
            if patience.expired():
                record.cancelled = True
            else:
                record.error = f"{type(error).__name__}: {error}"
        if record.error is None and record.finish_reason is None and not record.cancelled:
            record.error = "the stream ended without a finish_reason"
        record.end_s = now()
        return record

    async def _read(self, path: str, body: dict[str, Any], record: Record) -> None:
        assert self._session is not None, "used outside of its context"
        now = asyncio.get_running_loop().time
        content = msgspec.json.encode(body)
        data = io.BytesIO(content) if len(content) > LARGE_BYTES else content
        async with self._session.post(self._url + path, data=data, allow_redirects=False) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.read()).decode(errors='replace')[:200]}"
                return
            rest = bytearray()
            # Not line by line: aiohttp takes none of more than 512 KiB, and log-probabilities may be longer.
            async for piece in response.content.iter_any():
                now_s = now()
                rest += piece
                if b"\n" in piece:
                    *lines, last = bytes(rest).split(b"\n")
                    for line in lines:
                        _take(line, record, now_s)
                    rest = bytearray(last)
            _take(bytes(rest), record, now())


def _take(line: bytes, record: Record, now_s: float) -> None:
    """A line of the stream. Raises ValueError for data that is no chunk."""
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
    """Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(text.decode(errors="replace"))  # knows NaN, minds no broken characters, says where it ends


def _proxy_of(url: str) -> str | None:
    """What the environment asks for, as httpx reads it. aiohttp would look for every request, in a thread."""
    parts, proxies = urlsplit(url), getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found or proxy_bypass(parts.hostname or ""):
        return None
    return found if "://" in found else f"http://{found}"


def poisson_arrivals(rate_rps: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times in [0, duration_s), seconds."""
    rng = random.Random(seed)
    arrivals, t_s = [], rng.expovariate(rate_rps)
    while t_s < duration_s:
        arrivals.append(t_s)
        t_s += rng.expovariate(rate_rps)
    return arrivals


@contextlib.contextmanager
def heap_left_alone() -> Iterator[None]:
    """Meanwhile the garbage collector passes over what is there now: to walk what a benchmark has imported takes a
    tenth of a second and more, which would stand in the times of every answer that comes just then."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def open_loop(
    arrivals_s: Sequence[float], send: Callable[[int], Awaitable[Record]], on_record: Callable[[int, Record], None]
) -> None:
    """Sends request i at ``arrivals_s[i]`` whatever became of the others; returns when all have ended.

    Cancelling it cancels what is in flight.
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
    send: Callable[[int], Awaitable[Record]],
    on_record: Callable[[int, Record], None],
) -> None:
    """So many users, each of which sends the next of ``count`` requests ``think_s`` after the answer to the one before.

    A slow server is asked less: the times count from when a request was sent.
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
