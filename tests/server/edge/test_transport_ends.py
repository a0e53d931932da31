"""How connections end, and how one request's end leaves the next one alone, on sockets."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry

from neaptide.server.edge.transport import TransportLimits
from neaptide.server.observe.metrics import ServerMetrics
from tests.server.conftest import USER, Server
from tests.server.live import Live, RawClient, request_bytes, serving

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": USER, "max_tokens": 2}).encode()
SHORT = TransportLimits(header_s=0.3, body_idle_s=5.0, write_idle_s=0.3, linger_s=0.3, farewell_s=0.2)
LARGE_BYTES = 2 << 20


class Large:
    """A server of one large reply, and what it counts."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.add_api_route("/", lambda: Response(b"x" * LARGE_BYTES))
        self._registry = CollectorRegistry()
        self.app.state.metrics = ServerMetrics(self._registry)

    def value(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0.0

    async def until_none_is_open(self, within_s: float) -> None:
        for _ in range(int(within_s / 0.005)):
            if not self.value("neaptide_connections"):
                return
            await asyncio.sleep(0.005)
        raise AssertionError("still open")


@pytest.fixture
def large() -> Large:
    return Large()


@pytest.fixture
async def short(server: Server) -> AsyncIterator[Live]:
    """A server whose patience is a fraction of a second; only between two requests it has all the time."""
    async with serving(server.app, SHORT, timeout_keep_alive=75) as live:
        yield live


async def reply_before_the_end(client: RawClient) -> bytes:
    """Has a request answered that is not all sent; returns the rest of it."""
    request = request_bytes("POST", "/v1/nowhere", b"x" * 100)
    await client.send(request[:-50])
    assert (await client.reply())[0] == 404
    return request[-50:]


# ---- readers that stop -----------------------------------------------------------------------------------


@pytest.mark.acceptance("A13", "a reader that stops, of a connection that ends with its reply")
@pytest.mark.parametrize("num_read_bytes", [0, 200_000])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_reader_of_a_last_reply_that_stops_is_cut(large: Large, version: str, num_read_bytes: int) -> None:
    async with serving(large.app, SHORT) as live:
        client = await live.connect(receive_buffer_bytes=4096)
        request = request_bytes("GET", "/", headers={"connection": "close"} if version == "1.1" else None)
        await client.send(request.replace(b"HTTP/1.1", b"HTTP/" + version.encode()))
        await client.reader.readexactly(1 + num_read_bytes)
        await large.until_none_is_open(within_s=5)
        assert large.value("neaptide_connections_ended_total", reason="slow_reader") == 1


# ---- what follows a reply --------------------------------------------------------------------------------


async def test_garbage_behind_a_request_ends_the_connection(large: Large) -> None:
    async with serving(large.app, SHORT, timeout_keep_alive=75) as live:
        client = await live.connect()
        await client.send(request_bytes("GET", "/nowhere") + b"GARBAGE\r\n\r\n")
        assert (await client.reply())[0] == 404
        start_s = time.monotonic()
        assert await client.refusal() == (400, "invalid_http")
        # The client keeps its side open.
        await large.until_none_is_open(within_s=2)
        assert time.monotonic() - start_s > SHORT.farewell_s / 2


async def test_the_next_request_has_its_own_time_after_an_early_reply(short: Live) -> None:
    client = await short.connect()
    rest = await reply_before_the_end(client)
    await client.send(rest + request_bytes("POST", CHAT, BODY)[:-1])
    await asyncio.sleep(2 * SHORT.linger_s)
    await client.send(BODY[-1:])
    assert (await client.reply())[0] == 200


async def test_a_connection_is_left_alone_after_an_early_reply(short: Live) -> None:
    client = await short.connect()
    await client.send(await reply_before_the_end(client))
    await asyncio.sleep(2 * SHORT.header_s)
    await client.send(request_bytes("GET", "/health"))
    assert (await client.reply())[0] == 200


async def test_an_idle_connection_ends_without_a_word_after_an_early_reply(server: Server) -> None:
    async with serving(server.app, timeout_keep_alive=0.3) as live:
        client = await live.connect()
        await client.send(await reply_before_the_end(client))
        assert await asyncio.wait_for(client.reader.read(), 5) == b""


async def test_headers_that_begin_with_the_end_of_an_early_reply_have_their_deadline(short: Live) -> None:
    client = await short.connect()
    await client.send(await reply_before_the_end(client) + b"GET /hea")
    assert await client.refusal() == (408, "request_timeout")


# ---- sizes -----------------------------------------------------------------------------------------------


async def test_headers_of_60_kb_are_fine(short: Live) -> None:
    client = await short.connect()
    await client.send(request_bytes("GET", "/health", headers={"x": "a" * 60_000}))
    assert (await client.reply())[0] == 200


async def test_headers_of_70_kb_are_too_large(short: Live) -> None:
    client = await short.connect()
    await client.send(request_bytes("GET", "/health", headers={"x": "a" * 70_000}))
    assert await client.refusal() == (431, "headers_too_large")
