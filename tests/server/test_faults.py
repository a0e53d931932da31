"""Clients that leave, engines that die, servers that are full or on their way down."""

import asyncio
import json
import logging
from typing import Any

import httpx
import openai
import pytest

from neaptide.engine.params import FinishReason
from neaptide.server.context import Admission
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import until
from tests.server.asgi import Exchange, settle
from tests.server.conftest import MODEL_ID, USER, Server, make_server

CHAT = "/v1/chat/completions"


def _body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL_ID, "messages": USER, "max_tokens": 1000, **more}


@pytest.mark.acceptance("A12", "clients that leave before the first token")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_before_the_first_token_aborts(server: Server, stream: bool, n: int) -> None:
    server.engine.released.clear()
    exchange = Exchange(server.app, CHAT, _body(stream=stream, n=n))
    await until(lambda: len(server.engine.requests) == n)
    exchange.hang_up()
    await asyncio.gather(exchange.task, return_exceptions=True)
    await settle()
    assert {request_id for request_id, _ in server.engine.aborts} == {r.request_id for r in server.engine.requests}
    assert all(reason is FinishReason.ABORT for _, reason in server.engine.aborts)
    assert server.engine.num_running == 0
    assert server.context.client.num_in_flight == 0


@pytest.mark.acceptance("A12", "clients that leave in mid-stream")
@pytest.mark.parametrize("n", [1, 2])
async def test_disconnect_in_mid_stream_aborts_quietly(
    server: Server, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.delay_s = 0.002
    exchange = Exchange(server.app, CHAT, _body(stream=True, n=n))
    await exchange.until('"content":')
    exchange.hang_up()
    await exchange.task
    await settle()
    assert server.engine.num_running == 0
    assert server.context.client.num_in_flight == 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert 'outcome="aborted",tier="default"' in (await server.http.get("/metrics")).text


@pytest.mark.acceptance("A2", "requests in the step that the engine did not survive", count=2)
async def test_death_before_the_first_token_is_503(server: Server) -> None:
    server.engine.die_after = 0
    for stream in (False, True):
        server.engine.attach()
        with pytest.raises(openai.InternalServerError) as caught:
            await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, stream=stream)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.code == "engine_unavailable"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_dies_with_the_engine_in_silence_is_not_to_be_tried_again(
    server: Server, stream: bool
) -> None:
    server.engine.die_after = 0
    reply = await server.http.post(CHAT, json=_body(stream=stream))
    assert (reply.status_code, reply.headers["x-should-retry"]) == (503, "false")


async def test_a_request_that_had_answered_when_the_engine_died_may_be_tried_again(server: Server) -> None:
    server.engine.die_after = 3
    reply = await server.http.post(CHAT, json=_body())
    assert reply.status_code == 503
    assert "x-should-retry" not in reply.headers


@pytest.mark.acceptance("A2", "requests that waited when the engine died", count=2)
@pytest.mark.parametrize("stream", [False, True])
async def test_waiting_request_is_given_to_the_next_engine(server: Server, stream: bool) -> None:
    server.engine.released.clear()
    exchange = Exchange(server.app, CHAT, _body(stream=stream, max_tokens=3))
    await until(lambda: len(server.engine.requests) == 1)
    server.engine.die(in_step=False)
    server.engine.released.set()
    server.engine.attach()
    await exchange.task
    assert exchange.status == 200
    first, second = server.engine.requests
    assert first == second
    assert server.context.client.num_in_flight == 0


async def test_waiting_request_that_leaves_between_two_engines_reaches_no_other(server: Server) -> None:
    server.engine.released.clear()
    exchange = Exchange(server.app, CHAT, _body())
    await until(lambda: len(server.engine.requests) == 1)
    server.engine.die(in_step=False)
    exchange.hang_up()
    await asyncio.gather(exchange.task, return_exceptions=True)
    server.engine.attach()
    await settle()
    assert len(server.engine.requests) == 1
    assert server.context.client.num_in_flight == 0


@pytest.mark.acceptance("A2", "streams cut by the engine's death", count=2)
@pytest.mark.parametrize("n", [1, 2])
async def test_death_in_mid_stream_is_an_error_event_then_done(server: Server, n: int) -> None:
    server.engine.die_after = 3
    exchange = Exchange(server.app, CHAT, _body(stream=True, n=n))
    await exchange.task
    assert exchange.status == 200
    assert exchange.events[-1] == "[DONE]"
    assert set(exchange.events[-2]["error"]) == {"message", "type", "param", "code"}
    assert exchange.events[-2]["error"]["code"] == "engine_unavailable"
    assert not any(event["choices"][0].get("finish_reason") for event in exchange.events[:-2])


async def test_a_stream_cut_by_shutdown_says_so(server: Server) -> None:
    server.engine.delay_s = 0.002
    exchange = Exchange(server.app, CHAT, _body(stream=True))
    await exchange.until('"content":')
    exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)
    assert exchange.task.cancelled()
    assert exchange.events[-2]["error"]["code"] == "server_shutdown"
    assert exchange.events[-1] == "[DONE]"
    await settle()
    assert server.engine.num_running == 0


async def test_a_whole_reply_cut_by_shutdown_is_503(server: Server) -> None:
    server.engine.released.clear()
    exchange = Exchange(server.app, CHAT, _body())
    await until(lambda: len(server.engine.requests) == 1)
    exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)
    assert exchange.task.cancelled()
    assert (exchange.status, json.loads(exchange.text)["error"]["code"]) == (503, "server_shutdown")
    assert exchange.headers["retry-after"]
    assert exchange.headers["x-request-id"].startswith("req_")
    await settle()
    assert server.engine.num_running == 0


async def test_sdk_raises_for_a_stream_that_fails(server: Server) -> None:
    server.engine.fail_after = 2
    stream = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, stream=True)
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "engine_error"
    assert "secret" not in str(caught.value)


async def test_engine_error_is_500_for_a_whole_reply(server: Server) -> None:
    server.engine.fail_after = 2
    with pytest.raises(openai.InternalServerError) as caught:
        await server.openai.chat.completions.create(model=MODEL_ID, messages=USER)
    assert caught.value.status_code == 500
    assert "secret" not in caught.value.response.text


async def test_engine_error_is_not_to_be_tried_again(server: Server) -> None:
    server.engine.fail_after = 0
    reply = await server.http.post(CHAT, json=_body())
    assert (reply.status_code, reply.headers["x-should-retry"]) == (500, "false")


@pytest.mark.acceptance("A6", "how a row with NaN logits is told and counted")
@pytest.mark.parametrize("reason", ["numerical_error", "internal_error", "out_of_memory"])
async def test_engine_error_is_told_by_its_code_and_counted(server: Server, reason: str) -> None:
    server.engine.fail_after = 2
    server.engine.fail_reason = reason
    reply = await server.http.post(CHAT, json=_body())
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, reason)
    assert f'neaptide_engine_errors_total{{code="{reason}"}} 1.0' in (await server.http.get("/metrics")).text


async def test_no_engine_is_503_with_retry_after(server: Server) -> None:
    server.engine.die()
    for path in (CHAT, "/health", "/ready", "/readyz"):
        post = path == CHAT
        reply = await (server.http.post(path, json=_body()) if post else server.http.get(path))
        assert reply.status_code == 503
        assert reply.headers["retry-after"]
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_server_that_replaces_its_engine_is_alive_until_it_gives_up(server: Server) -> None:
    server.engine.die()
    assert (await server.http.get("/livez")).status_code == 200
    server.context.client.has_given_up = True
    reply = await server.http.get("/livez")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
    server.engine.attach()
    assert (await server.http.get("/livez")).status_code == 200


async def test_draining_refuses_new_work_and_readiness(server: Server) -> None:
    server.context.draining = True
    reply = await server.http.post(CHAT, json=_body())
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_shutdown")
    assert (await server.http.get("/ready")).status_code == 503
    assert (await server.http.get("/health")).status_code == 200


async def test_overload_is_503_online_and_429_flex(server: Server) -> None:
    server.context.admission = Admission(max_online=1, max_offline=1)
    online = await server.http.post(CHAT, json=_body(n=2, max_tokens=1))
    flex = await server.http.post(CHAT, json=_body(n=2, max_tokens=1, service_tier="flex"))
    assert (online.status_code, online.headers["retry-after"]) == (503, "1")
    assert (flex.status_code, flex.json()["error"]["code"]) == (429, "resource_unavailable")
    assert flex.json()["error"]["type"] == "rate_limit_error"
    assert "Resource Unavailable" in flex.json()["error"]["message"]
    assert (await server.http.post(CHAT, json=_body(max_tokens=1))).status_code == 200
    text = (await server.http.get("/metrics")).text
    assert 'neaptide_admission_rejected_total{reason="overloaded",tier="flex"} 1.0' in text


@pytest.mark.acceptance("A15", "requests at once, five times the cap", count=100)
@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_sudden_crowd_exactly_the_cap_is_admitted(server: Server, stream: bool) -> None:
    server.context.admission = Admission(max_online=20, max_offline=20)
    server.engine.released.clear()
    crowd = [asyncio.ensure_future(server.http.post(CHAT, json=_body(stream=stream, max_tokens=1))) for _ in range(100)]
    await until(lambda: sum(reply.done() for reply in crowd) == 80)
    refused = [reply.result() for reply in crowd if reply.done()]
    assert {(reply.status_code, reply.headers["retry-after"]) for reply in refused} == {(503, "1")}
    assert len(server.engine.requests) == 20
    # The other class has its own room.
    flex = asyncio.ensure_future(server.http.post(CHAT, json=_body(service_tier="flex", max_tokens=1)))
    await until(lambda: len(server.engine.requests) == 21)
    server.engine.released.set()
    assert [reply.status_code for reply in await asyncio.gather(*crowd, flex)].count(200) == 21
    assert (await server.http.get("/load")).json() == {"server_load": 0}


async def test_a_key_that_fills_the_server_leaves_another_its_place(tokenizer: Tokenizer) -> None:
    server = make_server(tokenizer, keys=("greedy", "other"))
    server.context.admission = Admission(max_online=4, max_offline=4)
    server.engine.released.clear()

    def ask(key: str, n: int) -> "asyncio.Future[httpx.Response]":
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.ensure_future(server.http.post(CHAT, json=_body(n=n, max_tokens=1), headers=headers))

    greedy = ask("greedy", 4)
    await until(lambda: len(server.engine.requests) == 4)
    assert (await ask("greedy", 1)).status_code == 503
    other = ask("other", 2)
    await until(lambda: len(server.engine.requests) == 6)
    server.engine.released.set()
    assert [(await one).status_code for one in (greedy, other)] == [200, 200]


async def test_silence_is_filled_with_comments(server: Server) -> None:
    server.context.keep_alive_s = 0.01
    server.engine.released.clear()
    exchange = Exchange(server.app, CHAT, _body(stream=True, max_tokens=2))
    await exchange.until(": keep-alive\n: keep-alive\n")
    server.engine.released.set()
    await exchange.task
    assert exchange.events[-1] == "[DONE]"
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.headers["cache-control"] == "no-cache"
    assert exchange.headers["x-accel-buffering"] == "no"
    assert "content-length" not in exchange.headers


async def test_failure_after_a_comment_is_an_error_event(server: Server) -> None:
    server.context.keep_alive_s = 0.01
    server.engine.released.clear()
    exchange = Exchange(server.app, CHAT, _body(stream=True))
    await exchange.until(": keep-alive")
    server.engine.die()
    await exchange.task
    assert exchange.events[-1] == "[DONE]"
    assert exchange.events[-2]["error"]["code"] == "engine_unavailable"


async def test_no_state_is_left_after_many_cancels(server: Server) -> None:
    server.engine.delay_s = 0.001
    for i in range(60):
        exchange = Exchange(server.app, CHAT, _body(stream=i % 2 == 0, n=1 + i % 3))
        await asyncio.sleep(0.0005 * (i % 7))
        exchange.hang_up()
        await asyncio.gather(exchange.task, return_exceptions=True)
    await settle()
    assert server.engine.num_running == 0
    assert server.context.client.num_in_flight == 0
    assert 'neaptide_requests_in_flight{tier="default"} 0.0' in (await server.http.get("/metrics")).text
    assert (await server.http.get("/load")).json() == {"server_load": 0}
