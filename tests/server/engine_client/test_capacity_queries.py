"""``GET /figures``: what a server says of itself to whoever decides where a request goes."""

import asyncio
import base64

import pytest

from neaptide.engine.messages import Room, StepOutputs, TellRoom
from tests.server.asgi import settle
from tests.server.conftest import Server
from tests.server.engine_client.loop_clock import LoopClock


def questions(server: Server) -> list[bool]:
    """What the engine has been asked: whether with its cache."""
    return [message.with_cached for message in server.engine.received if isinstance(message, TellRoom)]


def at(server: Server, now_s: float) -> None:
    server.context.clock = lambda: now_s


async def test_the_figures_are_the_engines(server: Server) -> None:
    at(server, 100.0)
    server.engine.room = Room(0.75, 0.001, b"12345678", 0.25)
    plain = {
        "age_ms": 0.0,
        "free_slack_ms": 750.0,
        "ttft_slo_ms": 30_000.0,
        "prompt_token_ms": 1.0,
        "block_size": 16,
        "online_load": 0.25,
        "cached": None,
    }
    assert (await server.http.get("/figures")).json() == plain
    with_cached = (await server.http.get("/figures?cached=true")).json()
    assert with_cached == plain | {"cached": base64.b64encode(b"12345678").decode()}


async def test_the_engine_is_not_asked_again_at_once(server: Server) -> None:
    at(server, 100.0)
    for _ in range(3):
        await server.http.get("/figures")
        await server.http.get("/figures?cached=true")
    assert questions(server) == [False, True]
    at(server, 100.1)
    await server.http.get("/figures?cached=true")
    assert questions(server) == [False, True]
    await server.http.get("/figures")
    assert questions(server) == [False, True, False]
    at(server, 100.5)
    await server.http.get("/figures?cached=true")
    assert questions(server) == [False, True, False, True]


async def test_a_step_that_takes_long_leaves_what_was_said_before_and_its_age(
    server: Server, loop_clock: LoopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that it is never over by itself, however slow the machine is.
    monkeypatch.setattr("neaptide.server.engine_client.capacity_queries.ANSWER_S", 1000.0)
    at(server, 100.0)
    await server.http.get("/figures")
    server.engine.room = None
    at(server, 103.0)
    asking = asyncio.ensure_future(server.http.get("/figures"))
    await settle()
    await loop_clock.pass_s(900.0)
    assert not asking.done()
    await loop_clock.pass_s(200.0)
    found = (await asking).json()
    assert (found["age_ms"], found["free_slack_ms"]) == (3000.0, 750.0)


async def test_who_asks_while_another_waits_hears_the_same_answer(server: Server) -> None:
    server.engine.room = None
    first, second = (asyncio.ensure_future(server.http.get("/figures")) for _ in range(2))
    await settle()
    server.context.client.on_message(StepOutputs([], [], room=Room(0.25, 0.001)))
    assert [reply.json()["free_slack_ms"] for reply in (await first, await second)] == [250.0, 250.0]


async def test_an_engine_that_says_nothing_is_not_there(server: Server, loop_clock: LoopClock) -> None:
    server.engine.room = None
    asking = asyncio.ensure_future(server.http.get("/figures"))
    await settle()
    await loop_clock.pass_s(1.1)
    assert ((await asking).status_code, questions(server)) == (503, [False])


async def test_an_engine_that_dies_has_no_figures_and_the_next_has_its_own(server: Server) -> None:
    await server.http.get("/figures")
    server.engine.room = None
    asking = asyncio.ensure_future(server.http.get("/figures?cached=true"))
    await settle()
    server.engine.die()
    assert [(await asking).status_code, (await server.http.get("/figures")).status_code] == [503, 503]
    server.engine.room = Room(0.5, 0.001)
    server.engine.attach()
    assert (await server.http.get("/figures")).json()["free_slack_ms"] == 500.0


async def test_a_server_that_stops_wants_no_new_work(server: Server) -> None:
    server.context.draining = True
    reply = await server.http.get("/figures")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_shutdown")
