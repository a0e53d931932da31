"""The app behind a real HTTP server: what in-process transports hide."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S, until
from tests.server.asgi import settle
from tests.server.conftest import USER, Server, make_server
from tests.server.live import serving

CHAT = "/v1/chat/completions"


@pytest.fixture
async def live(tokenizer: Tokenizer) -> AsyncIterator[tuple[Server, httpx2.AsyncClient]]:
    built = make_server(tokenizer)
    async with serving(built.app) as server:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as http:
            yield built, http


async def test_an_offer_of_another_protocol_is_no_news(
    live: tuple[Server, httpx2.AsyncClient], caplog: pytest.LogCaptureFixture
) -> None:
    """Clients in Java offer HTTP/2 with every request."""
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAAB"}
    reply = await live[1].get("/v1/models", headers=offer)
    assert (reply.status_code, reply.http_version) == (200, "HTTP/1.1")
    assert caplog.messages == []


async def test_tokens_arrive_one_by_one(live: tuple[Server, httpx2.AsyncClient]) -> None:
    server, http = live
    body = {"messages": USER, "max_tokens": 20, "stream": True}
    server.engine.delay_s = 0.005
    reads = 0
    async with http.stream("POST", CHAT, json=body) as reply:
        assert reply.status_code == 200
        text = ""
        async for part in reply.aiter_text():
            reads += 1
            text += part
    assert text.endswith("data: [DONE]\n\n")
    assert reads > 5


@pytest.mark.acceptance("A12", "clients that hang up on the socket")
@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_aborts(live: tuple[Server, httpx2.AsyncClient], stream: bool) -> None:
    server, http = live
    server.engine.delay_s = 0.005
    body: dict[str, Any] = {"messages": USER, "max_tokens": 4000, "stream": stream}
    if stream:
        async with http.stream("POST", CHAT, json=body) as reply:
            async for _ in reply.aiter_bytes():
                break
    else:
        waiting = asyncio.create_task(http.post(CHAT, json=body))
        await until(lambda: server.engine.num_running == 1)
        waiting.cancel()
    await until(lambda: server.engine.num_running == 0 and server.context.client.num_in_flight == 0)
    await settle()
    assert len(server.engine.aborts) == 1


async def test_connection_lives_on_after_a_stream_and_after_errors(live: tuple[Server, httpx2.AsyncClient]) -> None:
    server, http = live
    for _ in range(3):
        streamed = await http.post(CHAT, json={"messages": USER, "max_tokens": 2, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await http.post(CHAT, json={"messages": USER, "n": 0})).status_code == 400
        assert (await http.head("/metrics")).status_code == 200
    assert len(server.engine.requests) == 3
