"""More connections than the cap: which one makes room, and what is answered where none can."""

import json
from typing import Any

import pytest

from neaptide.server.http.transport import PROBE_CONNECTIONS, TransportLimits
from tests.server.conftest import USER, Server
from tests.server.http.test_transport import ended
from tests.server.live import Live, RawClient, request_bytes, serving

CHAT = "/v1/chat/completions"


def limits(max_connections: int, silence_s: float = 60.0) -> TransportLimits:
    return TransportLimits(max_connections=max_connections, silence_s=silence_s, farewell_s=0.2)


def chat_bytes(connection: str = "close", **more: Any) -> bytes:
    body = json.dumps({"messages": USER, "max_tokens": 2, **more}).encode()
    return request_bytes("POST", CHAT, body, {"connection": connection})


async def get(client: RawClient, path: str = "/health") -> int:
    await client.send(request_bytes("GET", path))
    return (await client.reply())[0]


async def is_closed(client: RawClient) -> bool:
    return await client.reader.read() == b""


async def busy(server: Server, live: Live, count: int) -> list[RawClient]:
    """Connections whose streams have begun and do not end until the engine is released."""
    server.context.keep_alive_s = 0.01
    server.engine.released.clear()
    clients = [await live.connect() for _ in range(count)]
    for client in clients:
        await client.send(chat_bytes(stream=True))
        assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    return clients


async def test_the_connection_that_has_been_idle_longest_makes_room(server: Server) -> None:
    async with serving(server.app, limits(3)) as live:
        first, second, third = [await live.connect() for _ in range(3)]
        for client in (first, second, third, first):
            assert await get(client) == 200
        assert await get(await live.connect(), "/v1/models") == 200
        assert await is_closed(second)
        assert [await get(client) for client in (first, third)] == [200, 200]
        assert await ended(server, "idle") == 1


@pytest.mark.acceptance("A14", "silent sockets, more than the cap, against a probe and a chat", count=12)
async def test_silent_connections_make_room(server: Server) -> None:
    async with serving(server.app, limits(3, silence_s=0.0)) as live:
        silent = [await live.connect() for _ in range(12)]
        assert await get(await live.connect()) == 200
        client = await live.connect()
        await client.send(chat_bytes())
        assert (await client.reply())[0] == 200
        assert await is_closed(silent[0])


async def test_a_new_connection_has_a_moment_to_speak(server: Server) -> None:
    async with serving(server.app, limits(2)) as live:
        young = [await live.connect() for _ in range(2)]
        late = await live.connect()
        await late.send(chat_bytes())
        assert await late.refusal() == (503, "overloaded")
        assert [await get(client, "/v1/models") for client in young] == [200, 200]


@pytest.mark.acceptance("A15", "more connections than the cap")
async def test_streams_stay_and_a_further_connection_may_only_ask_for_probes(server: Server) -> None:
    async with serving(server.app, limits(3)) as live:
        streams = await busy(server, live, 3)
        probe = await live.connect()
        assert [await get(probe, path) for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
        await probe.send(chat_bytes())
        status, headers, _ = await probe.reply()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert await is_closed(probe)
        assert await ended(server, "refused") == 1
        server.engine.released.set()
        for stream in streams:
            assert b"data: [DONE]" in await stream.reader.read()


async def test_the_room_for_probes_has_an_end(server: Server) -> None:
    async with serving(server.app, limits(1)) as live:
        await busy(server, live, 1)
        probes = [await live.connect() for _ in range(PROBE_CONNECTIONS)]
        late = await live.connect()
        assert await late.refusal() == (503, "overloaded")
        assert await get(probes[0]) == 200
        # That one rests now, and makes room for the next.
        assert await get(await live.connect()) == 200
        assert await is_closed(probes[0])


async def test_a_reply_that_is_still_being_sent_makes_no_room(server: Server) -> None:
    server.engine.tokens_per_output = 1000
    async with serving(server.app, limits(1)) as live:
        reader = await live.connect(receive_buffer_bytes=4096)
        await reader.send(chat_bytes("keep-alive", n=30, max_tokens=2000))
        head = await reader.reader.readuntil(b"\r\n\r\n")
        begun = await reader.reader.readexactly(1000)
        late = await live.connect()
        await late.send(chat_bytes())
        assert await late.refusal() == (503, "overloaded")
        num_bytes = int(head.lower().split(b"content-length: ")[1].split()[0])
        assert json.loads(begun + await reader.reader.readexactly(num_bytes - 1000))["object"] == "chat.completion"
