"""What sockets see of a stop signal: old and new connections, streams that end and streams that are cut."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from neaptide.launch.connections import uvicorn_config
from neaptide.launch.stopping import Drain
from neaptide.server.settings import Settings
from tests.patience import PATIENCE_S, until
from tests.server.asgi import Exchange
from tests.server.conftest import USER, Server
from tests.server.engine_client.loop_clock import LoopClock
from tests.server.live import Live, RawClient, request_bytes, serving

CHAT = "/v1/chat/completions"


class Batches:
    """Notes that it was told to stop."""

    def __init__(self) -> None:
        self.num_suspended = 0

    def suspend(self) -> None:
        self.num_suspended += 1


@pytest.fixture
async def live(server: Server) -> AsyncIterator[Live]:
    async with serving(server.app, timeout_graceful_shutdown=1) as running:
        yield running


def drain_of(server: Server, live: Live, timeout_s: float = PATIENCE_S, min_s: float = 0.0) -> tuple[Drain, Batches]:
    batches = Batches()
    return Drain(live.runner, server.context, batches, timeout_s, min_s), batches


def chat_bytes(**more: Any) -> bytes:
    return request_bytes("POST", CHAT, json.dumps({"messages": USER, "max_tokens": 3, **more}).encode())


async def stream_of(server: Server, live: Live) -> RawClient:
    """A stream that has begun, with a comment, and whose engine says nothing until it is released."""
    server.context.keep_alive_s = 0.01
    server.engine.released.clear()
    client = await live.connect()
    await client.send(chat_bytes(stream=True))
    assert (await client.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    return client


async def refused(client: RawClient, data: bytes) -> tuple[int, str]:
    """Status and code of an error reply on a connection that stays open."""
    await client.send(data)
    status, _, body = await client.reply()
    return status, json.loads(body)["error"]["code"]


async def status_of(client: RawClient, path: str) -> int:
    await client.send(request_bytes("GET", path))
    return (await client.reply())[0]


@pytest.mark.acceptance("A16", "new and idle connections after a stop signal, while a stream runs")
@pytest.mark.parametrize("is_new", [False, True])
async def test_while_a_stream_ends_new_work_and_readiness_are_503(server: Server, live: Live, is_new: bool) -> None:
    idle = await live.connect()
    assert await status_of(idle, "/ready") == 200
    stream = await stream_of(server, live)
    drain, _ = drain_of(server, live)
    drain.on_signal()
    client = await live.connect() if is_new else idle
    assert await status_of(client, "/health") == 200
    assert await refused(client, request_bytes("GET", "/ready")) == (503, "server_shutdown")
    # Behind a load balancer the next connection leads to another server.
    assert await client.reader.read() == b""
    assert await refused(await live.connect(), chat_bytes()) == (503, "server_shutdown")
    assert not live.runner.should_exit
    server.engine.released.set()
    assert b'"finish_reason":"length"' in (text := await stream.reader.read())
    assert b"data: [DONE]" in text
    await live.serving
    with pytest.raises(ConnectionRefusedError):
        await live.connect()


async def test_new_connections_are_answered_for_the_drains_minimum(server: Server, live: Live) -> None:
    """As a load balancer makes them that has not looked at /ready since."""
    clock = LoopClock(asyncio.get_running_loop())
    drain, _ = drain_of(server, live, min_s=600.0)
    drain.on_signal()
    await clock.pass_s(599.0)
    assert await refused(await live.connect(), chat_bytes()) == (503, "server_shutdown")
    assert not live.runner.should_exit
    await clock.pass_s(2.0)
    await live.serving


async def test_a_second_signal_ends_the_drains_minimum(server: Server, live: Live) -> None:
    drain, _ = drain_of(server, live, min_s=PATIENCE_S)
    drain.on_signal()
    drain.on_signal()
    await live.serving


async def test_a_stream_that_does_not_end_in_time_is_cut(server: Server, live: Live) -> None:
    stream = await stream_of(server, live)
    drain, _ = drain_of(server, live, timeout_s=0.05)
    drain.on_signal()
    assert b'"code":"server_shutdown"' in await stream.reader.read()
    await live.serving


async def test_a_second_signal_does_not_wait(server: Server, live: Live) -> None:
    await stream_of(server, live)
    drain, batches = drain_of(server, live)
    drain.on_signal()
    drain.on_signal()
    await live.serving
    assert live.runner.force_exit
    assert batches.num_suspended == 1


async def test_without_work_a_signal_ends_the_server_at_once(server: Server, live: Live) -> None:
    idle = await live.connect()
    assert await status_of(idle, "/ready") == 200
    drain, batches = drain_of(server, live)
    drain.on_signal()
    await live.serving
    assert await idle.reader.read() == b""
    assert not live.runner.force_exit
    assert batches.num_suspended == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_that_is_cut_is_no_error_to_the_http_server(server: Server, streams: bool) -> None:
    server.context.keep_alive_s = 0.01
    server.engine.released.clear()
    config = uvicorn_config(Settings(), server.app, server.app.state.metrics)
    exchange = Exchange(config.app, CHAT, {"messages": USER, "stream": streams})
    await until(lambda: len(server.engine.requests) == 1 and bool(exchange.sent) is streams)
    exchange.task.cancel()
    await exchange.task
    assert '"server_shutdown"' in exchange.text
