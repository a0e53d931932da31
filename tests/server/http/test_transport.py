"""Deadlines, sizes and the cap of connections, on sockets."""

import asyncio
import json
import resource
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

import pytest

from neaptide.launch.connections import room_for
from neaptide.server.http.transport import TransportLimits, waited_s
from tests.patience import until
from tests.server.conftest import USER, Server
from tests.server.engine_client.loop_clock import LoopClock
from tests.server.live import Live, request_bytes, serving

CHAT = "/v1/chat/completions"
LIMITS = TransportLimits(header_s=1000.0, body_idle_s=1000.0, write_idle_s=1000.0, linger_s=1000.0, farewell_s=500.0)
"""Seconds of the loop's clock, which the tests turn."""


def chat_bytes(**more: Any) -> bytes:
    return request_bytes("POST", CHAT, json.dumps({"messages": USER, "max_tokens": 2, **more}).encode())


@pytest.fixture
async def live(server: Server) -> AsyncIterator[Live]:
    async with serving(server.app, LIMITS) as running:
        yield running


async def ended(server: Server, reason: str) -> float:
    """How many connections the server has ended for this reason."""
    for line in (await server.http.get("/metrics")).text.splitlines():
        if line.startswith(f'neaptide_connections_ended_total{{reason="{reason}"}}'):
            return float(line.split()[-1])
    return 0.0


async def until_cut(server: Server, clock: LoopClock) -> None:
    """The server has given up a reader; the clock goes on until it does."""

    async def is_cut() -> bool:
        await clock.pass_s(LIMITS.write_idle_s / 2)
        return await ended(server, "slow_reader") == 1

    await until(is_cut)


# ---- slow requests ---------------------------------------------------------------------------------------


@pytest.mark.acceptance("A14", "silent sockets")
async def test_who_says_nothing_gets_408_and_is_closed(server: Server, live: Live, loop_clock: LoopClock) -> None:
    client = await live.connect()
    await live.until_heard()
    await loop_clock.pass_s(0.9 * LIMITS.header_s)
    assert await ended(server, "request") == 0
    await loop_clock.pass_s(0.2 * LIMITS.header_s)
    assert await client.refusal() == (408, "request_timeout")
    assert await ended(server, "request") == 1


@pytest.mark.acceptance("A14", "slow headers")
@pytest.mark.parametrize("on_a_used_connection", [False, True])
async def test_headers_that_trickle_get_408(
    server: Server, live: Live, loop_clock: LoopClock, on_a_used_connection: bool
) -> None:
    client = await live.connect()
    if on_a_used_connection:
        await client.send(request_bytes("GET", "/health"))
        assert (await client.reply())[0] == 200
    await client.send(b"GET /health HTTP/1.1\r\n")
    for _ in range(4):
        # Every byte comes in time; only the whole does not.
        assert await ended(server, "header") == 0
        await client.send(b"x")
        await live.until_heard()
        await loop_clock.pass_s(0.3 * LIMITS.header_s)
    assert await client.refusal() == (408, "request_timeout")
    assert await ended(server, "header") == 1


@pytest.mark.acceptance("A14", "slow bodies")
async def test_a_body_that_rests_gets_408(server: Server, live: Live, loop_clock: LoopClock) -> None:
    client = await live.connect()
    await client.send(chat_bytes()[:-5])
    await live.until_heard()
    await loop_clock.pass_s(1.1 * LIMITS.body_idle_s)
    assert await client.refusal() == (408, "request_timeout")
    assert server.engine.requests == []
    assert await ended(server, "body") == 1


@pytest.mark.acceptance("A14", "bodies below the minimum rate")
async def test_a_body_that_trickles_gets_408(server: Server, live: Live, loop_clock: LoopClock) -> None:
    client = await live.connect()
    await client.send(request_bytes("POST", CHAT, b"", {"content-length": "100000"}))
    for _ in range(4):
        assert await ended(server, "body") == 0
        await client.send(b" ")
        await live.until_heard()
        await loop_clock.pass_s(0.3 * LIMITS.body_idle_s)
    assert await client.refusal() == (408, "request_timeout")


async def test_a_body_above_the_minimum_rate_may_take_its_time(server: Server, loop_clock: LoopClock) -> None:
    limits = TransportLimits(body_idle_s=1000.0, min_body_rate_bytes_per_s=0.01)
    async with serving(server.app, limits) as live:
        client = await live.connect()
        request = chat_bytes()
        head = request.index(b"\r\n\r\n") + 4
        await client.send(request[:head])
        for i in range(head, len(request), 10):
            await client.send(request[i : i + 10])
            await live.until_heard()
            await loop_clock.pass_s(900.0)
        assert (await client.reply())[0] == 200


async def test_a_connection_between_two_requests_is_left_alone(live: Live, loop_clock: LoopClock) -> None:
    client = await live.connect()
    for _ in range(2):
        await client.send(chat_bytes())
        assert (await client.reply())[0] == 200
        await loop_clock.pass_s(2 * LIMITS.header_s)


async def test_idle_connections_end_after_the_keep_alive_time(server: Server, loop_clock: LoopClock) -> None:
    async with serving(server.app, timeout_keep_alive=1000) as live:
        client = await live.connect()
        for _ in range(2):
            await client.send(request_bytes("GET", "/health"))
            assert (await client.reply())[0] == 200
            await loop_clock.pass_s(900.0)
        await loop_clock.pass_s(200.0)
        assert await client.reader.read() == b""


async def test_an_answer_may_take_longer_than_any_deadline(server: Server, live: Live, loop_clock: LoopClock) -> None:
    server.engine.released.clear()
    client = await live.connect()
    await client.send(chat_bytes())
    await until(lambda: server.engine.requests)
    await loop_clock.pass_s(2 * LIMITS.header_s)
    server.engine.released.set()
    assert (await client.reply())[0] == 200


async def test_requests_in_one_packet_are_answered_in_turn(live: Live, loop_clock: LoopClock) -> None:
    client = await live.connect()
    await client.send(chat_bytes() + request_bytes("GET", "/version") + chat_bytes() + b"GET /hea")
    assert [(await client.reply())[0] for _ in range(3)] == [200, 200, 200]
    await loop_clock.pass_s(1.1 * LIMITS.header_s)
    assert await client.refusal() == (408, "request_timeout")


async def test_a_reply_does_not_wait_for_the_acknowledgement_of_its_headers(live: Live) -> None:
    client = await live.connect()

    async def exchange_s() -> float:
        start_s = time.perf_counter()
        await client.send(request_bytes("GET", "/version"))
        assert (await client.reply())[0] == 200
        return time.perf_counter() - start_s

    (connection,) = live.runner.server_state.connections
    assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    # A kernel that acknowledges late does so after 40 ms, each time, but not on the first packets.
    for _ in range(6):
        await exchange_s()
    for _ in range(300):
        if await exchange_s() < 0.03:
            return
    pytest.fail("every reply took as long as a late acknowledgement")


# ---- sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 70_000, (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: 1\r\n" * 101 + b"\r\n", (431, "headers_too_large")),
        (b"\x16\x03\x01\x02\x00 a TLS hello", (400, "invalid_http")),
        (b"GET /health\r\n\r\n", (400, "invalid_http")),
        (b"GET / HTTP/1.1\r\n\r\n", (400, "invalid_http")),
        (b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n", (400, "invalid_http")),
        (b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", (400, "invalid_http")),
        (
            b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
            (400, "invalid_http"),
        ),
    ],
)
async def test_what_is_no_request_gets_the_envelope(live: Live, data: bytes, expected: tuple[int, str]) -> None:
    client = await live.connect()
    await client.send(data)
    assert await client.refusal() == expected


async def test_a_hundred_headers_are_fine(live: Live) -> None:
    client = await live.connect()
    await client.send(request_bytes("GET", "/health", headers={f"x-{i}": "1" for i in range(97)}))
    assert (await client.reply())[0] == 200


async def test_a_broken_chunk_ends_the_request(server: Server, live: Live) -> None:
    client = await live.connect()
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % CHAT.encode()
    await client.send(head + b"transfer-encoding: chunked\r\n\r\n5\r\nabcde\r\nxyz\r\n")
    assert await client.refusal() == (400, "invalid_http")
    assert server.engine.requests == []


async def test_too_large_by_its_own_word_is_told_before_it_is_sent(
    server: Server, live: Live, loop_clock: LoopClock
) -> None:
    client = await live.connect()
    await client.send(request_bytes("POST", CHAT, b"{", {"content-length": str(33 << 20)}))
    status, _, body = await client.reply()
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
    await client.send(b"x" * 100_000)
    await loop_clock.pass_s(0.9 * LIMITS.linger_s)
    assert await ended(server, "linger") == 0
    await loop_clock.pass_s(0.2 * LIMITS.linger_s)
    assert await client.reader.read() == b""
    assert await ended(server, "linger") == 1


async def test_too_large_by_count_is_told(live: Live) -> None:
    client = await live.connect()
    await client.send(
        request_bytes("POST", CHAT, headers={"transfer-encoding": "chunked"}).replace(b"content-length: 0\r\n", b"")
    )
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"

    async def send_all() -> None:
        # A server that has heard enough may hang up before the last byte.
        with suppress(ConnectionError):
            for _ in range(33):
                await client.send(chunk)

    sending = asyncio.ensure_future(send_all())
    status, _, body = await client.reply()
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
    await sending


async def tiny_chunks(live: Live, num_chunks: int) -> tuple[float, float]:
    """A chat request whose body comes in chunks of six bytes: its time, and the event loop's longest pause; both of the
    processor, for what else runs on the machine holds a clock up but not this process."""
    body = json.dumps({"messages": USER, "max_tokens": 1}).encode()
    body += b" " * (6 * num_chunks - len(body))
    head = request_bytes("POST", CHAT, headers={"transfer-encoding": "chunked"}).replace(b"content-length: 0\r\n", b"")
    chunks = b"".join(b"6\r\n" + body[i : i + 6] + b"\r\n" for i in range(0, len(body), 6))
    client = await live.connect()
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            start_s = time.process_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.process_time() - start_s)

    watcher = asyncio.ensure_future(watch())
    start_s = time.process_time()
    await client.send(head + chunks + b"0\r\n\r\n")
    assert (await client.reply())[0] == 200
    seconds = time.process_time() - start_s
    watcher.cancel()
    client.close()
    return seconds, longest_s


@pytest.mark.parametrize("num_chunks", [12_500, pytest.param(125_000, marks=pytest.mark.full)])
async def test_tiny_chunks_cost_linear_time_and_hold_nobody_up(server: Server, num_chunks: int) -> None:
    """Four times the chunks would be 16 times the time if it went with their square. Each figure is the best of
    three."""
    async with serving(server.app) as live:
        once = [await tiny_chunks(live, num_chunks) for _ in range(3)]
        four_times = [await tiny_chunks(live, 4 * num_chunks) for _ in range(3)]
        assert min(four_times)[0] / min(once)[0] < 8.0
        assert min(longest_s / seconds for seconds, longest_s in four_times) < 1 / 3


# ---- slow readers ----------------------------------------------------------------------------------------


@pytest.mark.acceptance("A13", "a reader that stops")
async def test_a_reader_that_stops_is_cut_and_its_request_aborted(
    server: Server, live: Live, loop_clock: LoopClock
) -> None:
    client = await live.connect(receive_buffer_bytes=4096)
    await client.send(chat_bytes(stream=True, max_tokens=8000))
    await until_cut(server, loop_clock)
    await until_idle(server)
    text = (await server.http.get("/metrics")).text
    assert f'neaptide_requests_total{{endpoint="{CHAT}",outcome="aborted",tier="default"}} 1.0' in text


@pytest.mark.acceptance("A13", "a reader that stops after its reply is complete")
async def test_a_complete_reply_that_nobody_takes_is_cut(server: Server, live: Live, loop_clock: LoopClock) -> None:
    server.engine.tokens_per_output = 1000
    client = await live.connect(receive_buffer_bytes=4096)
    await client.send(chat_bytes(n=30, max_tokens=2000))
    await until_cut(server, loop_clock)


async def test_a_slow_reader_that_goes_on_reading_gets_everything(
    server: Server, live: Live, loop_clock: LoopClock
) -> None:
    client = await live.connect(receive_buffer_bytes=4096)
    await client.send(chat_bytes(stream=True, max_tokens=5000))
    text, num_reads = b"", 0
    while b"[DONE]" not in text:
        part = await client.reader.read(1024)
        assert part, "cut"
        text += part
        num_reads += 1
        await loop_clock.pass_s(LIMITS.write_idle_s / 40)
    assert num_reads > 80  # twice as long as it may rest
    assert b'"finish_reason":"length"' in text


async def test_a_slow_reader_of_a_whole_reply_gets_everything(
    server: Server, live: Live, loop_clock: LoopClock
) -> None:
    server.engine.tokens_per_output = 1000
    client = await live.connect(receive_buffer_bytes=4096)
    await client.send(chat_bytes(n=30, max_tokens=2000))
    head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
    rest = int(head.split(b"content-length: ")[1].split()[0])
    assert rest > 100 << 10
    while rest:
        part = await client.reader.read(1024)
        assert part, "cut"
        rest -= len(part)
        await loop_clock.pass_s(LIMITS.write_idle_s / 40)


@pytest.mark.acceptance("A13", "bytes that wait for a reader")
async def test_what_waits_for_a_reader_is_bounded_and_nothing_is_lost(server: Server) -> None:
    async with serving(server.app) as live:
        client = await live.connect(receive_buffer_bytes=4096)
        await client.send(chat_bytes(stream=True, max_tokens=4000))
        await until_idle(server, num_in_flight=1)
        text = b""
        while b"[DONE]" not in text:
            text += await client.reader.read(65_536)
        # One event per token would have been a megabyte.
        assert len(text) < 256 << 10
        assert b'"finish_reason":"length"' in text


async def until_idle(server: Server, num_in_flight: int = 0) -> None:
    """The engine has done all; so many requests wait for their readers."""
    await until(
        lambda: (
            server.engine.requests
            and (server.engine.num_running, server.context.client.num_in_flight) == (0, num_in_flight)
        )
    )


# ---- the cap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "room"),
    [
        (1024, 65_536, 4352, 4096),
        (1024, resource.RLIM_INFINITY, 4352, 4096),
        (1024, 2048, 2048, 1792),
        (65_536, 65_536, None, 4096),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised_to: int | None, room: int
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: found.append(limits))
    assert room_for(4096) == room
    assert found == ([] if raised_to is None else [(raised_to, hard)])


def test_the_kernel_says_how_long_bytes_have_waited() -> None:
    class Peer:
        def getsockopt(self, level: int, option: int, num_bytes: int) -> bytes:
            assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
            fields = [0] * 14
            fields[13] = 250  # Two words of bytes, then eleven numbers before this one.
            return struct.pack("14I", *fields)[:num_bytes]

    assert waited_s(cast("socket.socket", Peer())) == 0.25
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert waited_s(ours) == 0.0  # It has no such clock.
