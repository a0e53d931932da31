"""How connections end, and how one request's end leaves the next one alone, on sockets."""

import json
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry

from neaptide.server.http.transport import TransportLimits
from neaptide.server.observe.metrics import ServerMetrics
from tests.patience import until
from tests.server.conftest import USER, Server
from tests.server.engine_client.loop_clock import LoopClock
from tests.server.live import Live, RawClient, request_bytes, serving

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": USER, "max_tokens": 2}).encode()
LIMITS = TransportLimits(header_s=1000.0, body_idle_s=9000.0, write_idle_s=1000.0, linger_s=1000.0, farewell_s=500.0)
"""Seconds of the loop's clock, which the tests turn."""
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

    @property
    def is_open(self) -> bool:
        return self.value("neaptide_connections") > 0


@pytest.fixture
def large() -> Large:
    return Large()


@pytest.fixture
async def live(server: Server) -> AsyncIterator[Live]:
    async with serving(server.app, LIMITS) as running:
        yield running


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
async def test_a_reader_of_a_last_reply_that_stops_is_cut(
    large: Large, loop_clock: LoopClock, version: str, num_read_bytes: int
) -> None:
    async def is_cut() -> bool:
        await loop_clock.pass_s(LIMITS.write_idle_s / 2)
        return not large.is_open

    async with serving(large.app, LIMITS) as live:
        client = await live.connect(receive_buffer_bytes=4096)
        request = request_bytes("GET", "/", headers={"connection": "close"} if version == "1.1" else None)
        await client.send(request.replace(b"HTTP/1.1", b"HTTP/" + version.encode()))
        await client.reader.readexactly(1 + num_read_bytes)
        await until(is_cut)
        assert large.value("neaptide_connections_ended_total", reason="slow_reader") == 1


# ---- what follows a reply --------------------------------------------------------------------------------


async def test_garbage_behind_a_request_ends_the_connection(large: Large, loop_clock: LoopClock) -> None:
    async with serving(large.app, LIMITS) as live:
        client = await live.connect()
        await client.send(request_bytes("GET", "/nowhere") + b"GARBAGE\r\n\r\n")
        assert (await client.reply())[0] == 404
        assert await client.refusal() == (400, "invalid_http")
        # The client keeps its side open.
        await loop_clock.pass_s(0.9 * LIMITS.farewell_s)
        assert large.is_open
        await loop_clock.pass_s(0.2 * LIMITS.farewell_s)
        assert not large.is_open


async def test_the_next_request_has_its_own_time_after_an_early_reply(live: Live, loop_clock: LoopClock) -> None:
    client = await live.connect()
    rest = await reply_before_the_end(client)
    await client.send(rest + request_bytes("POST", CHAT, BODY)[:-1])
    await live.until_heard()
    await loop_clock.pass_s(2 * LIMITS.linger_s)
    await client.send(BODY[-1:])
    assert (await client.reply())[0] == 200


async def test_a_connection_is_left_alone_after_an_early_reply(live: Live, loop_clock: LoopClock) -> None:
    client = await live.connect()
    await client.send(await reply_before_the_end(client))
    await live.until_heard()
    await loop_clock.pass_s(2 * LIMITS.header_s)
    await client.send(request_bytes("GET", "/health"))
    assert (await client.reply())[0] == 200


async def test_an_idle_connection_ends_without_a_word_after_an_early_reply(
    server: Server, loop_clock: LoopClock
) -> None:
    async with serving(server.app, LIMITS, timeout_keep_alive=3000) as live:
        client = await live.connect()
        await client.send(await reply_before_the_end(client))
        await live.until_heard()
        await loop_clock.pass_s(3300.0)
        assert await client.reader.read() == b""


async def test_headers_that_begin_with_the_end_of_an_early_reply_have_their_deadline(
    live: Live, loop_clock: LoopClock
) -> None:
    client = await live.connect()
    await client.send(await reply_before_the_end(client) + b"GET /hea")
    await live.until_heard()
    await loop_clock.pass_s(1.1 * LIMITS.header_s)
    assert await client.refusal() == (408, "request_timeout")


# ---- sizes -----------------------------------------------------------------------------------------------


async def test_headers_of_60_kb_are_fine(live: Live) -> None:
    client = await live.connect()
    await client.send(request_bytes("GET", "/health", headers={"x": "a" * 60_000}))
    assert (await client.reply())[0] == 200


async def test_headers_of_70_kb_are_too_large(live: Live) -> None:
    client = await live.connect()
    await client.send(request_bytes("GET", "/health", headers={"x": "a" * 70_000}))
    assert await client.refusal() == (431, "headers_too_large")
