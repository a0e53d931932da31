"""A server of HTTP/1.1 that says to each request what a test has written down, byte by byte if need be."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PAUSE_S = 0.01
"""Between two pieces, so that they come one by one."""


@dataclass(slots=True)
class Scripted:
    url: str = ""
    heads: list[bytes] = field(default_factory=list)
    """Of requests, in lower case."""
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has ended its connection."""


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


def chunked(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def stream(pieces: Sequence[bytes], *, is_whole: bool = True) -> Answer:
    """The pieces of an event stream, one by one; then its end, or the connection's."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for piece in pieces:
            writer.write(chunked(piece))
            await writer.drain()
            await asyncio.sleep(PAUSE_S)
        if is_whole:
            writer.write(b"0\r\n\r\n")
        else:
            writer.close()

    return answer


def plain(status: str, body: bytes, headers: bytes = b"") -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n%s\r\n%s" % (status.encode(), len(body), headers, body))

    return answer


@asynccontextmanager
async def scripted(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[Scripted]:
    state = Scripted()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, after = head.partition(b"content-length: ")
                state.heads.append(head)
                state.bodies.append(await reader.readexactly(int(after.split(b"\r\n")[0])))
                await answer(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            state.left.set()
        finally:
            writer.close()

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(serve(reader, writer)))

    server = await asyncio.start_server(start, "127.0.0.1", 0, ssl=context)
    state.url = f"{'http' if context is None else 'https'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
