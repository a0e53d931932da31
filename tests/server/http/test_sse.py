"""Event streams: bytes of an event, and a reply whose reader leaves or whose keep-alive meets an event."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from neaptide.server.http.sse import EventStream, event
from tests.server.asgi import settle
from tests.server.conftest import USER, Server


def test_an_event_is_one_line_for_every_reader() -> None:
    text = "a\u2028b\u2029c\x85d\r\n\N{SNOWMAN}"
    data = event({"text": text})
    assert data.startswith(rb'data: {"text":"a\u2028b\u2029c\u0085d')
    assert data.endswith(b"\n\n")
    assert json.loads(data.removeprefix(b"data: ")) == {"text": text}
    assert len(data.decode().splitlines()) == 2


async def test_a_reader_by_lines_gets_whole_events(server: Server) -> None:
    text = "one\x85two\u2028three\u2029four"
    server.engine.script = server.context.tokenizer.encode(text)
    body = {"messages": USER, "max_tokens": 100, "stream": True}
    async with server.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = [line async for line in reply.aiter_lines() if line]
    *events, done = [line.removeprefix("data: ") for line in lines]
    assert "".join(json.loads(data)["choices"][0]["delta"].get("content") or "" for data in events) == text
    assert done == "[DONE]"


class Reply:
    """A stream that is sent to a client which may leave; ``send`` takes a turn of the loop for every message."""

    def __init__(self, events: AsyncGenerator[bytes, None], keep_alive_s: float = 60.0, leaves_after: int = 99) -> None:
        self.sent: list[Message] = []
        self.num_attempts = 0
        self.num_sending = self.most_sending = 0
        self._leaves_after = leaves_after
        self.task = asyncio.ensure_future(
            EventStream(events, keep_alive_s)({"type": "http"}, self._receive, self._send)
        )

    async def _receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Message) -> None:
        self.num_attempts += 1
        if len(self.sent) >= self._leaves_after:
            raise OSError("the client is gone")
        self.num_sending += 1
        self.most_sending = max(self.most_sending, self.num_sending)
        await settle()
        self.num_sending -= 1
        self.sent.append(message)


async def test_a_write_that_fails_ends_the_stream_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "neaptide")
    is_closed = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal is_closed
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            is_closed = True

    reply = Reply(events(), leaves_after=3)
    await reply.task
    assert (len(reply.sent), reply.num_attempts) == (3, 4)
    assert is_closed
    assert caplog.records == []


async def test_a_comment_does_not_come_between_the_parts_of_an_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            await settle()
            yield b"data: 1\n\n"

    reply = Reply(events(), keep_alive_s=1e-9)
    await reply.task
    assert reply.most_sending == 1
    assert [message["type"] for message in reply.sent].index("http.response.start") == 0
    assert [message.get("body") for message in reply.sent[-2:]] == [b"data: [DONE]\n\n", b""]
    comments = {body for message in reply.sent if (body := message.get("body", b"")).startswith(b":")}
    assert comments == {b": keep-alive\n"}  # The Go client takes every empty line for the end of an event.


async def test_no_comments_where_the_time_is_zero() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await settle()
        yield b"data: 1\n\n"

    reply = Reply(events(), keep_alive_s=0.0)
    await reply.task
    assert [message.get("body") for message in reply.sent[1:]] == [b"data: 1\n\n", b"data: [DONE]\n\n", b""]
