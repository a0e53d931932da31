"""Flex requests that wait too long are told so before their client gives up."""

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers

from neaptide.engine.params import FinishReason
from neaptide.server.http.patience import patience_s
from tests.patience import until
from tests.server.asgi import Exchange
from tests.server.conftest import USER, Server
from tests.server.engine_client.loop_clock import LoopClock

CHAT = "/v1/chat/completions"
FLEX: dict[str, Any] = {"messages": USER, "max_tokens": 3, "service_tier": "flex"}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (None, 540),
        ("600", 540),
        ("600.0", 540),
        ("100", 90),
        ("3600", 540),
        ("nan", 540),
        ("inf", 540),
        ("-5", 540),
        ("0", 540),
        ("soon", 540),
    ],
)
def test_the_limit_lies_before_both_timeouts(sent: str | None, expected: float) -> None:
    headers = Headers({} if sent is None else {"x-stainless-read-timeout": sent})
    assert patience_s(headers, 600) == pytest.approx(expected)


async def test_a_flex_request_without_a_token_is_answered_429_and_aborted(
    server: Server, loop_clock: LoopClock
) -> None:
    server.engine.released.clear()
    asked = asyncio.ensure_future(server.http.post(CHAT, json=FLEX, headers={"x-stainless-read-timeout": "400"}))
    await until(lambda: server.engine.requests)
    await loop_clock.pass_s(350.0)
    assert server.engine.num_running == 1
    await loop_clock.pass_s(20.0)
    reply = await asked
    assert reply.status_code == 429
    assert reply.json()["error"]["code"] == "resource_unavailable"
    assert "Resource Unavailable" in reply.json()["error"]["message"]
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert server.engine.aborts == [(server.engine.requests[0].request_id, FinishReason.ABORT)]
    assert server.engine.num_running == 0
    samples = [s for f in text_string_to_metric_families((await server.http.get("/metrics")).text) for s in f.samples]
    (shed,) = [s.value for s in samples if s.name == "neaptide_requests_total" and s.labels["outcome"] == "shed"]
    assert shed == 1


async def test_our_own_cap_holds_without_a_header(server: Server) -> None:
    server.engine.released.clear()
    server.context.flex_wait_s = 0.05
    assert (await server.http.post(CHAT, json={**FLEX, "n": 2})).status_code == 429
    assert server.engine.num_running == 0


async def test_a_first_token_in_time_lifts_the_limit(server: Server, loop_clock: LoopClock) -> None:
    server.engine.delay_s = 800.0
    server.context.flex_wait_s = 1000.0
    asked = asyncio.ensure_future(server.http.post(CHAT, json={**FLEX, "max_tokens": 30}))
    await until(lambda: server.engine.requests)
    for _ in range(30):
        assert server.engine.num_running == 1
        await loop_clock.pass_s(800.0)
    reply = await asked
    assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 30)


@pytest.mark.parametrize("more", [{"stream": True}, {"service_tier": "default"}])
async def test_streams_and_online_requests_have_no_such_limit(server: Server, more: dict[str, Any]) -> None:
    server.engine.delay_s = 0.1
    server.context.flex_wait_s = 0.01
    exchange = Exchange(server.app, CHAT, {**FLEX, **more})
    await exchange.task
    assert exchange.status == 200
