"""Tokens that go to their connection as they come, without a task that wakes for each: the same bytes, and no harm."""

import json
import re
from typing import Any

import pytest

from neaptide.engine.messages import RequestOutput, StepOutputs
from neaptide.engine.params import FinishReason
from neaptide.server.http import transport
from neaptide.server.http.sse import EventStream, Output
from neaptide.server.openai.respond import ResponseAssembler
from tests.patience import until
from tests.server.conftest import USER, Server
from tests.server.live import Live, RawClient, request_bytes, serving

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOKENS = [270, 271, 300, 280, 12, 281]
OWN = re.compile(rb'[0-9a-f]{24,32}|(?<="completed_at":)[0-9]+|(?<="metrics":){[^}]*}')
"""What is each reply's own: ids and times."""


class Stream:
    """A streamed request over a socket whose tokens the test tells one by one."""

    def __init__(self, server: Server, client: RawClient, request_id: str) -> None:
        self._server, self._client, self._id = server, client, request_id

    @classmethod
    async def begin(cls, server: Server, live: Live, path: str, body: dict[str, Any]) -> "Stream":
        server.engine.released.clear()
        client, num_before = await live.connect(), len(server.engine.requests)
        await client.send(request_bytes("POST", path, json.dumps({"stream": True, **body}).encode()))
        await until(lambda: len(server.engine.requests) > num_before)
        return cls(server, client, server.engine.requests[-1].request_id)

    async def tell(self, *tokens: int, ends: bool = False, is_last: bool = True) -> None:
        reason = FinishReason.LENGTH if ends else None
        output = RequestOutput(self._id, list(tokens), finish_reason=reason)
        self._server.context.client.on_message(StepOutputs([output], []), is_last=is_last)

    async def chunk(self) -> bytes:
        """The next chunk of the reply's body."""
        line = (await self._client.reader.readline()).strip()
        while not re.fullmatch(rb"[0-9a-f]+", line):
            line = (await self._client.reader.readline()).strip()
        return (await self._client.reader.readexactly(int(line, 16) + 2))[:-2]

    async def whole(self, tokens: list[int]) -> list[bytes]:
        """All chunks of an answer of these tokens, without what is its own."""
        found = []
        for token in tokens[:-1]:
            await self.tell(token)
            found.append(await self.chunk())
        await self.tell(tokens[-1], ends=True)
        while b"[DONE]" not in (found[-1] if found else b""):
            found.append(await self.chunk())
        return [OWN.sub(b"", chunk) for chunk in found]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is written without a task."""
    found: list[bytes] = []
    write_now = Output.write_now

    def write(output: Output, data: bytes) -> None:
        found.append(data)
        write_now(output, data)

    monkeypatch.setattr(Output, "write_now", write)
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER}),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": False}}),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (COMPLETIONS, {"prompt": "a"}),
        (COMPLETIONS, {"prompt": "a", "echo": True}),
        (RESPONSES, {"input": "a"}),
    ],
)
async def test_the_bytes_are_those_of_the_task(
    server: Server, monkeypatch: pytest.MonkeyPatch, written: list[bytes], path: str, body: dict[str, Any]
) -> None:
    server.context.wall_clock = lambda: 1_700_000_000.0
    async with serving(server.app) as live:
        at_once = await (await Stream.begin(server, live, path, body)).whole(TOKENS)
        assert len(written) == len(TOKENS) - 2  # The first begins the reply, the last ends it.
        monkeypatch.setattr(EventStream, "output_now", lambda _: None)
        by_task = await (await Stream.begin(server, live, path, body)).whole(TOKENS)
    assert len(written) == len(TOKENS) - 2
    assert at_once == by_task


@pytest.mark.parametrize("body", [{"stop": ["zzz"]}, {"n": 2}, {"logprobs": True}])
async def test_what_needs_more_than_text_is_left_to_the_task(
    server: Server, written: list[bytes], body: dict[str, Any]
) -> None:
    async with serving(server.app) as live:
        stream = await Stream.begin(server, live, CHAT, {"messages": USER, **body})
        for token in TOKENS[:3]:
            await stream.tell(token)
            await stream.chunk()
    assert written == []


async def test_line_separators_are_escaped_in_text_that_is_written_at_once(
    server: Server, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.context.tokenizer, "token_bytes", lambda _: "\u2028é".encode())
    async with serving(server.app) as live:
        stream = await Stream.begin(server, live, CHAT, {"messages": USER})
        for _ in range(2):
            await stream.tell(270)
            chunk = await stream.chunk()
    assert written == [chunk]
    assert '"content":"\\u2028é"'.encode() in chunk


async def test_tokens_of_several_steps_that_wait_come_in_one_piece(server: Server, written: list[bytes]) -> None:
    async with serving(server.app) as live:
        stream = await Stream.begin(server, live, COMPLETIONS, {"prompt": "a"})
        await stream.tell(270)
        await stream.chunk()
        await stream.tell(271, is_last=False)
        await stream.tell(272)
        chunk = await stream.chunk()
        tokenizer = server.context.tokenizer
        text = (tokenizer.token_bytes(271) + tokenizer.token_bytes(272)).decode()
        assert json.loads(chunk.removeprefix(b"data: "))["choices"][0]["text"] == text
        assert written == []
        await stream.tell(273)
        assert [await stream.chunk()] == written


async def test_a_fault_in_one_stream_ends_that_stream_alone(
    server: Server, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = ResponseAssembler.feed

    def fail(assembler: ResponseAssembler, index: int, output: RequestOutput) -> Any:
        if output.new_token_ids == [399]:
            raise ZeroDivisionError
        return feed(assembler, index, output)

    monkeypatch.setattr(ResponseAssembler, "feed", fail)
    async with serving(server.app) as live:
        faulty, other = [await Stream.begin(server, live, CHAT, {"messages": USER}) for _ in range(2)]
        for stream in (faulty, other):
            await stream.tell(270)
            await stream.chunk()
        await faulty.tell(399)
        assert b'"code":"internal_error"' in await faulty.chunk()
        await other.tell(271)
        assert [await other.chunk()] == written


async def test_a_request_arrives_when_its_bytes_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "waited_s", lambda _: 3.0)
    begun_s = server.context.clock()
    async with serving(server.app) as live:
        await Stream.begin(server, live, CHAT, {"messages": USER})
    assert begun_s - 3.0 <= server.engine.requests[0].arrival_s <= server.context.clock() - 3.0
