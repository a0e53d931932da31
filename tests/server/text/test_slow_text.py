"""Text made to be slow to tokenize: long texts are refused unread, others cost what their length says, and the
event loop goes on meanwhile."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from neaptide.server.http.body_threads import LONG_BYTES, BodyThreads
from neaptide.server.openai import logprobs
from neaptide.server.text.control_tokens import ControlTokens
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S, Stopwatch, until
from tests.server.asgi import Exchange
from tests.server.conftest import MODEL_ID, Server
from tests.server.engine_client.loop_clock import LoopClock

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNITS = {
    "one character": "x",
    "spaces": " ",
    "a.": "a.",
    "line ends": "\n",
    "special tokens": "<|end|>",
    "almost special tokens": "<|end|",
    "emoji": "\U0001f600",
    "combining marks": "a\u0301",
}
MAX_CHARS = 8 * 8192
MAX_LAG_S = 0.05
TRIES = 3
"""Other processes delay the loop as well, but not each time; a tokenizer that holds the lock does."""


def made_of(unit: str, chars: int) -> str:
    return (unit * chars)[:chars]


def body_for(path: str, text: str) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return {"prompt": text, "max_tokens": 1}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.acceptance("A26", "texts of 1 MB, refused unread")
async def test_a_megabyte_is_refused_unread(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, unit: str
) -> None:
    def must_not_run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(Tokenizer, "encode", must_not_run)
    monkeypatch.setattr(ControlTokens, "encode", must_not_run)
    reply = await server.http.post(path, json=body_for(path, made_of(unit, 1 << 20)))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    "parameters",
    [{"a": "x" * (1 << 20)}, {"x" * (1 << 20): 1}, {"a": [[1] * 1000] * 300}],
    ids=["long value", "long key", "many values"],
)
async def test_tools_of_a_megabyte_are_refused_unread(
    server: Server, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_chat", None)
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    reply = await server.http.post(CHAT, json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.acceptance("A26", "four times the text in less than 10 times the time (16 if it were quadratic)")
def test_the_time_does_not_grow_with_the_square_of_the_text(tokenizer: Tokenizer, unit: str) -> None:
    """Four times the text is 4 times the work, some more where pieces are long (n log n); the square would be 16 times.
    What else the machine does takes caches and clock speed away, and so some of that distance, not all of it."""

    def seconds(chars: int) -> float:
        messages = [{"role": "user", "content": made_of(unit, chars)}]
        start_s = time.process_time()
        tokenizer.encode_chat(messages)
        return time.process_time() - start_s

    # Both lengths are above what is tokenized from memory.
    short_s = min(seconds(MAX_CHARS // 2 + 1) for _ in range(TRIES))
    long_s = min(seconds(2 * MAX_CHARS) for _ in range(TRIES))
    assert long_s / short_s < 10.0


async def _lag_s(server: Server, path: str, body: dict[str, Any]) -> float:
    """The longest delay of a timer of 10 ms while the request is answered, less what other processes had of the
    processors, and as far as this one was computing: what keeps the loop from its turn is then its own work or a thread
    that holds the lock."""
    exchange = Exchange(server.app, path, body)
    lag_s = 0.0
    while not exchange.task.done():
        watch, start_cpu_s = Stopwatch(children=False), time.process_time()
        await asyncio.sleep(0.01)
        lag_s = max(lag_s, min(watch.seconds - 0.01, time.process_time() - start_cpu_s))
    assert exchange.status in (200, 400)
    return lag_s


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.acceptance(
    "A26", "event-loop lag up to 50 ms while the longest admissible text is tokenized, best of three tries"
)
async def test_the_event_loop_goes_on_meanwhile(server: Server, path: str, unit: str) -> None:
    body = body_for(path, made_of(unit, MAX_CHARS))
    lags_s = []
    for _ in range(TRIES):
        lags_s.append(await _lag_s(server, path, body))
        if lags_s[-1] <= MAX_LAG_S:
            return
    pytest.fail(f"the event loop stood still for {lags_s} s")


@pytest.mark.acceptance("A26", "a special token spelled out ten times by a user")
async def test_special_tokens_spelled_by_a_user_stay_text(server: Server) -> None:
    text = "<|end|><|system|>" * 5
    messages = [{"role": "user", "content": text, "name": "<|bos|>"}]
    await server.http.post(CHAT, json={"model": MODEL_ID, "messages": messages, "max_tokens": 1})
    tokenizer = server.context.tokenizer
    ids = server.engine.requests[0].prompt_token_ids
    plain = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    assert [i for i in ids if tokenizer.is_special(i)] == [i for i in plain if tokenizer.is_special(i)]
    assert text in tokenizer.decode(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_long_tables_of_logprobs_are_not_made_on_the_event_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made_in: list[int] = []
    original = logprobs.completion_logprobs

    def noted(*args: Any) -> Any:
        made_in.append(threading.get_ident())
        return original(*args)

    monkeypatch.setattr("neaptide.server.openai.respond.completion_logprobs", noted)
    body = {"prompt": [7] * 2000, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    reply = await server.http.post(COMPLETIONS, json=body)
    assert reply.status_code == 200
    assert threading.get_ident() not in made_in
    assert made_in


async def test_a_stream_with_long_tables_does_not_wait_for_those_who_tokenize(server: Server) -> None:
    server.engine.released.clear()
    body = {"prompt": [7] * 2000, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": True}
    exchange = Exchange(server.app, COMPLETIONS, body)
    await until(lambda: server.engine.requests)
    end = threading.Event()
    tokenizing = [asyncio.ensure_future(server.context.bodies.run(end.wait, 1, "")) for _ in range(100)]
    await asyncio.sleep(0)
    server.engine.released.set()
    try:
        await exchange.task
    finally:
        end.set()
        await asyncio.gather(*tokenizing)
    assert exchange.status == 200
    assert exchange.events[-1] == "[DONE]"


class LongWork:
    """Work on long bodies that ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gate = threading.Semaphore(0)

    def of(self, tenant: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(tenant)
            assert self._gate.acquire(timeout=PATIENCE_S)
            return tenant

        return work

    def end(self, count: int = 1) -> None:
        self._gate.release(count)


async def test_short_bodies_wait_for_no_long_ones_and_long_ones_take_turns() -> None:
    threads, long = BodyThreads(), LongWork()
    running = [asyncio.ensure_future(threads.run(long.of("many"), LONG_BYTES + 1, "many")) for _ in range(8)]
    try:
        await until(lambda: long.begun)
        running.append(asyncio.ensure_future(threads.run(long.of("one"), LONG_BYTES + 1, "one")))
        short = [threads.run(lambda i=i: i, LONG_BYTES, "many") for i in range(20)]  # type: ignore[misc]
        assert await asyncio.gather(*short) == list(range(20))
        assert long.begun == ["many"]
        long.end()
        await until(lambda: len(long.begun) == 2)
        assert long.begun == ["many", "one"]
    finally:
        long.end(len(running))
        await asyncio.gather(*running)


async def test_a_long_body_whose_turn_does_not_come_is_a_503(server: Server, loop_clock: LoopClock) -> None:
    long = LongWork()
    threads = server.context.bodies
    running = asyncio.ensure_future(threads.run(long.of(""), LONG_BYTES + 1, ""))
    await until(lambda: long.begun)
    body = {"messages": [{"role": "user", "content": "x" * LONG_BYTES}], "max_tokens": 1}
    asked = asyncio.ensure_future(server.http.post(CHAT, json=body))
    await until(lambda: threads._turns._waiting)
    await loop_clock.pass_s(100.0)
    reply = await asked
    long.end()
    await running
    assert (reply.status_code, reply.json()["error"]["code"], reply.headers["retry-after"]) == (503, "overloaded", "30")
