"""Turns of the event loop: how they are measured, and when chats are refused for them."""

import asyncio

import pytest

from neaptide.server.http.errors import OverloadedError
from neaptide.server.http.loop_turns import NUM_STANDING, PERIOD_S, TURNS_TO_FIRST_TOKEN, LoopTurns
from tests.patience import until
from tests.server.conftest import USER, Server

CHAT = "/v1/chat/completions"
TOO_LONG_S = 1.01 * 0.5 / TURNS_TO_FIRST_TOKEN
"""Just above half of a target of a second, for all turns of a chat."""
OF_CLIENT = 2
"""Turns of a chat that its client takes on the same loop."""


def standing(turns: LoopTurns, turn_s: float) -> None:
    for _ in range(NUM_STANDING):
        turns.note(turn_s)


def test_turns_that_stand_are_refused_and_short_ones_are_not() -> None:
    turns = LoopTurns(ttft_slo_s=1.0)
    standing(turns, 0.99 * TOO_LONG_S)
    turns.check()
    standing(turns, TOO_LONG_S)
    with pytest.raises(OverloadedError):
        turns.check()
    turns.note(0.0)  # one short turn, and there is time to spare again
    turns.check()


def test_one_long_call_is_no_standing_queue() -> None:
    turns = LoopTurns(ttft_slo_s=1.0)
    for _ in range(NUM_STANDING - 1):
        turns.note(10.0)
    turns.check()


def test_a_longer_target_bears_longer_turns() -> None:
    turns = LoopTurns(ttft_slo_s=2.0)
    standing(turns, 1.9 * TOO_LONG_S)
    turns.check()


async def test_a_turn_is_what_the_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: a busy task takes 0.2 s of each turn."""
    loop, turns = asyncio.get_running_loop(), LoopTurns(ttft_slo_s=1.0)
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)

    async def busy() -> None:
        nonlocal now_s
        while True:
            now_s += 0.2
            await asyncio.sleep(0)

    task = asyncio.create_task(busy())
    turns.start()
    try:
        await until(lambda: turns.standing_s > 0)
        assert turns.standing_s == pytest.approx(0.2)
    finally:
        task.cancel()
        await turns.stop()
    assert PERIOD_S < 0.2


async def test_a_chat_is_refused_before_its_body_is_read_and_probes_are_not(server: Server) -> None:
    standing(server.context.turns, TOO_LONG_S)
    reply = await server.http.post(CHAT, content=b"{no json")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
    assert reply.headers["retry-after"] == "1"
    assert (await server.http.get("/health")).status_code == 200
    metrics = (await server.http.get("/metrics")).text
    assert 'neaptide_admission_rejected_total{reason="overloaded",tier="default"} 1.0' in metrics
    assert f"neaptide_event_loop_turn_seconds {TOO_LONG_S}" in metrics
    server.context.turns.note(0.0)
    assert (await server.http.post(CHAT, json={"messages": USER, "max_tokens": 1})).status_code == 200


async def test_a_chat_of_one_token_is_answered_within_the_turns_that_the_limit_counts_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, num_turns = asyncio.get_running_loop(), 0
    run_once = loop._run_once  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal num_turns
        num_turns += 1
        run_once()

    monkeypatch.setattr(loop, "_run_once", counted)
    before = num_turns
    reply = await server.http.post(CHAT, json={"messages": USER, "max_tokens": 1})
    assert reply.status_code == 200
    assert num_turns - before - OF_CLIENT == pytest.approx(TURNS_TO_FIRST_TOKEN, abs=2)
