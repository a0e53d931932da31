"""Waits of chats in the API process: how they are forecast, and when chats are refused for them."""

import asyncio
import json
from dataclasses import dataclass

import pytest

from neaptide.engine.messages import RequestOutput
from neaptide.server.http.body_threads import LONG_BYTES
from neaptide.server.http.errors import OverloadedError
from neaptide.server.http.own_waits import NUM_RECENT, OwnWait, OwnWaits
from neaptide.server.observe.timing import ChoiceTiming
from tests.patience import until
from tests.server.conftest import USER, Server
from tests.server.engine_client.loop_clock import LoopClock
from tests.server.live import request_bytes, serving

CHAT = "/v1/chat/completions"
LONGEST_S = 0.5
"""Half of a target of a second."""
TOO_LONG_S = 1e5


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> OwnWaits:
    return OwnWaits(1.0, clock)


def is_refused(waits: OwnWaits, arrival_s: float) -> bool:
    try:
        waits.check(arrival_s)
    except OverloadedError:
        return True
    return False


def test_a_wait_is_forecast_from_the_chats_on_the_way_and_the_recent_wait_for_each(
    waits: OwnWaits, clock: Clock
) -> None:
    first, second = waits.enter(arrival_s=99.0), waits.enter(arrival_s=99.0)
    first.note(first_s=clock.now_s, engine_s=0.75)
    second.note(first_s=clock.now_s, engine_s=0.5)
    assert waits.forecast_s == 2 * 0.25
    first.leave()
    first.leave()
    assert waits.forecast_s == 0.25


def test_pauses_of_a_few_chats_change_no_forecast(waits: OwnWaits, clock: Clock) -> None:
    waits.enter(clock.now_s)
    for number in range(NUM_RECENT):
        waits.note(10.0 if number % 3 == 0 else 0.001, 1)
    assert waits.forecast_s == 0.001


def test_a_wait_with_few_chats_on_the_way_does_not_grow_with_their_number(waits: OwnWaits, clock: Clock) -> None:
    waits.note(0.125, 1)
    for _ in range(16):
        waits.enter(clock.now_s)
    assert waits.forecast_s == 2 * 0.125


def test_the_next_chat_is_let_in_when_none_is_on_the_way(waits: OwnWaits, clock: Clock) -> None:
    waits.check(-TOO_LONG_S)
    clock.now_s += LONGEST_S
    waits.note(TOO_LONG_S, 1)
    last = waits.enter(clock.now_s)
    assert is_refused(waits, clock.now_s)
    last.leave()
    assert not is_refused(waits, clock.now_s)


@pytest.mark.parametrize("age_s", [0.0, 0.25])
def test_a_chat_is_late_by_its_age_and_its_forecast(waits: OwnWaits, clock: Clock, age_s: float) -> None:
    waits.check(-TOO_LONG_S)
    clock.now_s += LONGEST_S
    waits.enter(clock.now_s)
    waits.note(LONGEST_S - age_s, 1)
    assert not is_refused(waits, clock.now_s - age_s)
    assert is_refused(waits, clock.now_s - age_s - 0.01)


def test_a_burst_is_served_and_a_queue_that_stands_is_refused(waits: OwnWaits, clock: Clock) -> None:
    waits.note(LONGEST_S, 1)
    for _ in range(500):
        waits.check(clock.now_s)
        waits.enter(clock.now_s)
    clock.now_s += LONGEST_S
    assert is_refused(waits, clock.now_s)


def test_a_queue_that_is_seen_again_after_a_long_turn_is_refused(waits: OwnWaits, clock: Clock) -> None:
    waits.check(-TOO_LONG_S)
    clock.now_s += 10 * LONGEST_S
    assert is_refused(waits, -TOO_LONG_S)


def test_a_standing_queue_stays_within_its_limit_while_some_chats_are_in_time(waits: OwnWaits, clock: Clock) -> None:
    waits.check(-TOO_LONG_S)
    clock.now_s += LONGEST_S
    assert is_refused(waits, -TOO_LONG_S)
    assert not is_refused(waits, clock.now_s)
    assert is_refused(waits, -TOO_LONG_S)


def test_after_some_time_without_late_chats_a_burst_is_served_again(waits: OwnWaits, clock: Clock) -> None:
    waits.check(-TOO_LONG_S)
    clock.now_s += LONGEST_S
    assert is_refused(waits, -TOO_LONG_S)
    clock.now_s += LONGEST_S + 0.01
    waits.check(clock.now_s)
    assert not is_refused(waits, -TOO_LONG_S)


def test_single_late_chats_far_apart_are_served(waits: OwnWaits, clock: Clock) -> None:
    for _ in range(3):
        waits.check(clock.now_s - LONGEST_S - 0.01)
        clock.now_s += 100.0


def test_a_longer_target_bears_longer_waits(clock: Clock) -> None:
    waits = OwnWaits(2.0, clock)
    waits.check(-TOO_LONG_S)
    clock.now_s += 2 * LONGEST_S
    assert not is_refused(waits, clock.now_s - 2 * LONGEST_S)
    assert is_refused(waits, clock.now_s - 2 * LONGEST_S - 0.01)


def test_the_engines_part_of_a_first_token_ends_when_the_engine_has_it() -> None:
    timing = ChoiceTiming(sent_s=3.0)
    assert timing.engine_s == 0.0
    timing.on_output(RequestOutput("r", [7], first_token_s=5.0), now_s=5.5)
    assert timing.engine_s == 2.0


# ---- on sockets ----


async def overloaded(server: Server, clock: LoopClock) -> OwnWait:
    """From now on chats are refused, until the one leaves that is returned."""
    loop, waits = asyncio.get_running_loop(), server.context.waits
    server.context.clock = loop.time
    waits.check(-TOO_LONG_S)
    await clock.pass_s(server.context.ttft_slo_s)
    assert is_refused(waits, -TOO_LONG_S)
    waits.note(TOO_LONG_S, 1)
    return waits.enter(loop.time())


async def test_a_chat_is_refused_before_it_is_parsed_and_served_when_no_chat_waits(
    server: Server, loop_clock: LoopClock
) -> None:
    async with serving(server.app) as live:
        last = await overloaded(server, loop_clock)
        client = await live.connect()
        await client.send(request_bytes("POST", CHAT, b"{no json"))
        status, headers, body = await client.reply()
        assert (status, headers["retry-after"]) == (503, "1")
        assert headers["x-request-id"].startswith("req_")
        assert json.loads(body)["error"] == {
            "message": "The server is overloaded; try again shortly.",
            "type": "server_error",
            "param": None,
            "code": "overloaded",
        }
        last.leave()
        await client.send(request_bytes("POST", CHAT, json.dumps({"messages": USER, "max_tokens": 1}).encode()))
        assert (await client.reply())[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"content-length": "100"},
        {"connection": "close"},
        {"content-length": "2\r\ncontent-length: 2"},
        {"transfer-encoding": "chunked"},
    ],
    ids=["half a body", "the client's wish", "two lengths", "two ways to tell the length"],
)
async def test_the_connection_ends_where_the_next_request_may_begin_elsewhere(
    server: Server, loop_clock: LoopClock, headers: dict[str, str]
) -> None:
    async with serving(server.app) as live:
        await overloaded(server, loop_clock)
        client = await live.connect()
        await client.send(request_bytes("POST", CHAT, b"{}", headers))
        assert await client.refusal() == (503, "overloaded")


async def test_a_kept_connection_is_refused_and_probes_and_files_are_not(server: Server, loop_clock: LoopClock) -> None:
    async with serving(server.app) as live:
        await overloaded(server, loop_clock)
        client = await live.connect()
        for path, expected in (("/health", 200), ("/v1/models", 200), ("/v1/files", 404)):
            await client.send(request_bytes("POST" if path == "/v1/files" else "GET", path))
            assert (await client.reply())[0] == expected
        await client.send(request_bytes("POST", f"{CHAT}?api-version=1"))
        assert (await client.reply())[0] == 503


async def test_refusals_are_counted(server: Server, loop_clock: LoopClock) -> None:
    async with serving(server.app) as live:
        await overloaded(server, loop_clock)
        client = await live.connect()
        await client.send(request_bytes("POST", CHAT))
        assert (await client.reply())[0] == 503
    metrics = (await server.http.get("/metrics")).text
    assert 'neaptide_admission_rejected_total{reason="overloaded",tier="default"} 1.0' in metrics
    assert f'neaptide_requests_total{{endpoint="{CHAT}",outcome="shed",tier="default"}} 1.0' in metrics
    assert f"neaptide_api_process_wait_seconds {TOO_LONG_S}" in metrics


async def test_a_chat_is_on_the_way_until_the_engine_has_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, noted = server.context.waits, list[tuple[float, int]]()
    monkeypatch.setattr(waits, "note", lambda *of_chat: noted.append(of_chat))
    server.engine.released.clear()
    num_waiting = 0
    prepare = server.context.bodies.run

    async def watched(*args: object) -> object:
        nonlocal num_waiting
        num_waiting = waits.num_waiting
        return await prepare(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(server.context.bodies, "run", watched)
    async with serving(server.app) as live:
        client = await live.connect()
        body = json.dumps({"messages": USER, "max_tokens": 3}).encode()
        await client.send(request_bytes("POST", CHAT, body))
        await until(lambda: server.engine.requests)
        assert (num_waiting, waits.num_waiting, noted) == (1, 0, [])
        server.engine.released.set()
        assert (await client.reply())[0] == 200
        assert [count for _, count in noted] == [1]
        await client.send(request_bytes("POST", CHAT, b"{no json"))
        assert (await client.reply())[0] == 400
        assert waits.num_waiting == 0


@pytest.mark.parametrize("what", ["a long body", "a grammar"])
async def test_what_waits_for_its_turn_delays_no_short_chat(
    server: Server, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    waits, noted = server.context.waits, list[tuple[float, int]]()
    monkeypatch.setattr(waits, "note", lambda *of_chat: noted.append(of_chat))
    is_long = what == "a long body"
    queue = server.context.bodies._turns if is_long else server.context.grammar_turns
    body = {"messages": USER, "max_tokens": 1}
    if is_long:
        body |= {"metadata": {str(number): "x" * 512 for number in range(LONG_BYTES // 512 + 1)}}
    else:
        body |= {"structured_outputs": {"regex": "a+"}}
    async with serving(server.app) as live:
        client = await live.connect()
        async with queue.turn("another"):
            await client.send(request_bytes("POST", CHAT, json.dumps(body).encode()))
            await until(lambda: queue._waiting)
            assert waits.num_waiting == 0
        await client.reply()
        assert noted == []


async def test_a_chat_that_is_answered_before_its_body_has_come_is_not_on_the_way(server: Server) -> None:
    async with serving(server.app) as live:
        client = await live.connect()
        await client.send(request_bytes("POST", CHAT, headers={"content-type": "text/plain", "content-length": "2"}))
        assert (await client.reply())[0] == 400
        await client.send(b"{}")
        await live.until_heard()
        assert server.context.waits.num_waiting == 0


async def test_a_chat_whose_client_leaves_is_not_on_the_way(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = server.context.waits
    begun, go_on = asyncio.Event(), asyncio.Event()
    prepare = server.context.bodies.run

    async def held(*args: object) -> object:
        begun.set()
        await go_on.wait()
        return await prepare(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(server.context.bodies, "run", held)
    async with serving(server.app) as live:
        client = await live.connect()
        await client.send(request_bytes("POST", CHAT, json.dumps({"messages": USER, "max_tokens": 1}).encode()))
        await begun.wait()
        assert waits.num_waiting == 1
        client.close()
        await until(lambda: waits.num_waiting == 0)
        go_on.set()
