"""Sockets that are slow on purpose, of four kinds, and healthy clients to run next to them."""

import asyncio
import json
import random
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.recorder import ChatRecord

CHAT = "/v1/chat/completions"
RATE_RPS = 10.0
LONG_PROMPT = "\x01" * 4500
"""Every character is six bytes in a JSON event: two echoes of it do not fit into what may wait for a reader, and cost
the engine next to nothing. What is measured is slow reading, not the work of 500 streams."""


class Ending(NamedTuple):
    """How the server ended a slow socket."""

    kind: str
    seconds: float
    """Since it was opened; of a reader, since its reply began: a crowd of requests waits for its turn before that."""
    how: str
    """The status of a reply, or ``cut``."""


def _request(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % (length or len(body)) + body


async def _trickle(peer: socket.socket, begin: bytes, *, pause_s: float) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, begin)
    while True:
        await asyncio.sleep(pause_s)
        await loop.sock_sendall(peer, b"x")


async def slow_header(peer: socket.socket, rng: random.Random) -> None:
    await _trickle(peer, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ", pause_s=rng.choice((0.5, 1.0)))


async def slow_body(peer: socket.socket, rng: random.Random) -> None:
    await _trickle(peer, _request(CHAT, b'{"messages": [', length=100_000), pause_s=rng.choice((1.0, 3600.0)))


async def silent(peer: socket.socket, rng: random.Random) -> None:
    await asyncio.sleep(3600)


async def slow_reader(peer: socket.socket, rng: random.Random) -> None:
    body = {"prompt": LONG_PROMPT, "echo": True, "n": 2, "max_tokens": 1, "stream": True}
    await asyncio.get_running_loop().sock_sendall(peer, _request("/v1/completions", json.dumps(body).encode()))
    await asyncio.sleep(3600)


KINDS: dict[str, Callable[[socket.socket, random.Random], Coroutine[Any, Any, None]]] = {
    "header": slow_header,
    "body": slow_body,
    "silent": silent,
    "reader": slow_reader,
}


async def one_slow_socket(port: int, kind: str, rng: random.Random) -> Ending:
    """Opens one and is slow until the server ends it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        start_s = loop.time()
        await loop.sock_connect(peer, ("127.0.0.1", port))
        acting = asyncio.ensure_future(KINDS[kind](peer, rng))
        try:
            if kind == "reader":
                start_s = await _until_readable(peer)
                how = await _until_cut(peer)
            else:
                how = await _until_closed(peer)
        finally:
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)
        return Ending(kind, loop.time() - start_s, how)


async def _until_readable(peer: socket.socket) -> float:
    """The time at which something of the reply has come; takes nothing of it."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(peer, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(peer)
    return loop.time()


async def _until_closed(peer: socket.socket) -> str:
    """Reads until the end; the status of the reply, if there was one."""
    loop, reply = asyncio.get_running_loop(), b""
    with suppress(ConnectionError):
        while data := await loop.sock_recv(peer, 4096):
            reply += data
    return reply[9:12].decode() if reply.startswith(b"HTTP/1.1 ") else "cut"


async def _until_cut(peer: socket.socket) -> str:
    """Without reading: a connection that is gone has no peer any more."""
    while True:
        await asyncio.sleep(0.25)
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if info[0] != 1:  # no longer established
            return "cut"


async def healthy(base_url: str, duration_s: float, seed: int) -> list[ChatRecord]:
    records: list[ChatRecord] = []
    async with StreamClient(base_url, "neaptide-tiny", timeout_s=60.0) as client:
        arrivals = poisson_arrivals(RATE_RPS, duration_s, seed)

        def send(index: int) -> Coroutine[Any, Any, ChatRecord]:
            return client.chat([{"role": "user", "content": f"What is {index} + {seed}?"}], 16, ignore_eos=True)

        await open_loop(arrivals, send, lambda index, record: records.append(record))
    return records
