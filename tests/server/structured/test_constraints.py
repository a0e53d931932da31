"""From fields to one grammar in the engine's hands, and 400s for what cannot be held."""

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import httpx2
import pytest

from neaptide.engine.messages import AddRequest
from neaptide.server.context import ServingContext
from neaptide.server.openai.endpoints import CHAT, COMPLETIONS, RESPONSES
from neaptide.server.openai.prepare import prepare
from neaptide.server.structured.checker import TOO_LONG, CheckerBusyError, NoGrammarsError
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S, Stopwatch, until
from tests.server.conftest import USER, Server, make_context, make_server
from tests.server.engine_client.loop_clock import LoopClock
from tests.server.structured.test_lengths import chained
from tests.server.structured.test_schemas import MANY_ADDRESSES

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SIMPLE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}


def grammar_of(context: ServingContext, **fields: Any) -> str:
    return prepare(CHAT, {"messages": USER, **fields}, context).params.grammar


def test_text_is_free_unless_something_is_asked_for(tokenizer: Tokenizer) -> None:
    context = make_context(tokenizer)
    for fields in (
        {},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
    ):
        assert grammar_of(context, **fields) == ""


def test_names_of_one_thing_ask_for_the_same(tokenizer: Tokenizer) -> None:
    context, schema = make_context(tokenizer), {"type": "integer"}
    asked: list[dict[str, Any]] = [
        {"response_format": SIMPLE},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"guided_json": schema},
    ]
    assert len({grammar_of(context, **fields) for fields in asked}) == 1
    completion = prepare(COMPLETIONS, {"prompt": "x", "guided_json": schema}, context)
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    response = prepare(RESPONSES, {"input": "x", "text": text}, context)
    assert completion.params.grammar == response.params.grammar == grammar_of(context, guided_json=schema)


async def test_the_engine_gets_the_grammar_with_every_choice(server: Server) -> None:
    body = {"messages": USER, "response_format": SIMPLE, "n": 3, "max_tokens": 4}
    assert (await server.http.post(CHAT, json=body)).status_code == 200
    grammars = {message.params.grammar for message in server.engine.received if isinstance(message, AddRequest)}
    assert grammars == {grammar_of(server.context, response_format=SIMPLE)}


async def test_a_known_grammar_waits_for_no_others(server: Server) -> None:
    body = {"messages": USER, "response_format": SIMPLE, "max_tokens": 4}
    assert (await server.http.post(CHAT, json=body)).status_code == 200
    async with server.context.grammar_turns.turn("a stranger"):
        assert (await server.http.post(CHAT, json=body)).status_code == 200


async def test_an_executor_that_follows_no_grammars_is_not_asked_to(server: Server) -> None:
    server.context.follows_grammars = False
    for body, param in (
        ({"response_format": SIMPLE}, "response_format.json_schema.schema"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ):
        reply = await server.http.post(CHAT, json={"messages": USER, **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert (await server.http.post(CHAT, json={"messages": USER, "tools": [TOOL]})).status_code == 200


@pytest.mark.parametrize(("ends", "why"), [((), "has no end token."), ((5,), "tokenizer does not allow it.")])
async def test_a_model_that_has_no_grammars_is_told_why(
    server: Server, monkeypatch: pytest.MonkeyPatch, ends: tuple[int, ...], why: str
) -> None:
    def none(_: str) -> str:
        raise NoGrammarsError

    monkeypatch.setattr(server.context.grammars, "complaint", none)
    server.context.eos_token_ids = ends
    reply = await server.http.post(CHAT, json={"messages": USER, "response_format": SIMPLE})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["message"].endswith(why)


async def test_a_machine_that_is_too_busy_to_tell_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_: str) -> str:
        raise CheckerBusyError

    monkeypatch.setattr(server.context.grammars, "complaint", busy)
    reply = await server.http.post(CHAT, json={"messages": USER, "response_format": SIMPLE})
    assert reply.status_code == 503


class OneAtATime:
    """In place of a checker's ``complaint``: refuses each grammar when the test says so."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self._gate = threading.Semaphore(0)
        monkeypatch.setattr(server.context.grammars, "complaint", self._refuse)

    def _refuse(self, grammar: str) -> str:
        self.asked.append(grammar)
        self._gate.acquire(timeout=PATIENCE_S)
        return TOO_LONG

    def answer(self, count: int = 1) -> None:
        self._gate.release(count)


def asks(server: Server, key: str, expression: str) -> "asyncio.Future[httpx2.Response]":
    body = {"messages": USER, "guided_regex": expression}
    return asyncio.ensure_future(server.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"}))


async def test_a_key_whose_grammars_are_refused_delays_another_keys_by_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock
) -> None:
    server = make_server(tokenizer, keys=("hostile", "good"))
    checker = OneAtATime(server, monkeypatch)
    hostile = [asks(server, "hostile", f"a{i}") for i in range(24)]
    waiting = server.context.grammar_turns._waiting
    await until(lambda: sum(map(len, waiting.values())) == 23)
    asked = asks(server, "good", "good")
    await until(lambda: len(waiting) == 2)
    checker.answer()
    await until(lambda: len(checker.asked) == 2)
    assert "good" in checker.asked[1]
    # No one waits for a turn for longer than clients do.
    await loop_clock.pass_s(60.0)
    checker.answer()
    await loop_clock.pass_s(60.0)
    statuses = Counter([(await one).status_code for one in hostile])
    assert statuses == {503: 23, 400: 1}
    assert ((await asked).status_code, len(checker.asked)) == (400, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_followed_to_an_end_is_the_callers_fault(server: Server, stream: bool) -> None:
    server.engine.fail_after, server.engine.fail_reason = 1, "grammar_error"
    body = {"messages": USER, "guided_regex": "a+", "stream": stream}
    reply = await server.http.post(CHAT, json=body)
    error = json.loads(reply.text.split("data: ")[-2]) if stream else reply.json()
    assert reply.status_code == (200 if stream else 400)
    assert (error["error"]["type"], error["error"]["code"]) == ("invalid_request_error", "grammar_error")


HOSTILE: dict[str, dict[str, Any]] = {
    "deep nesting": {"guided_json": json.loads('{"items":' * 80 + "{}" + "}" * 80)},
    "a huge enumeration": {"guided_json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "a choice of everything": {"guided_choice": [str(i) for i in range(5_000)]},
    "1 MB": {"guided_grammar": "start: " + " | ".join(['"a"'] * 200_000)},
    "an expression with look-behind": {"guided_regex": "(?<=x)*"},
    "an expression that is deep": {"guided_regex": "(" * 9_000 + "a" + ")" * 9_000},
    "an intersection that explodes": {
        "guided_grammar": "start: T\nT: " + " & ".join(f"/.*{c}.{{{30 + i}}}/" for i, c in enumerate("abcdefgh"))
    },
    "a reference to itself": {"guided_json": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}},
    "references that double at each level": {"guided_json": chained(63) | {"uniqueItems": True}},
    "mail addresses": {"guided_json": MANY_ADDRESSES},
    "a reference to a file": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "a schema that is only itself": {"guided_json": {"$ref": "#"}},
    "rules that only lead to each other": {"guided_grammar": "start: a\na: b\nb: a"},
    "an expression that nothing matches": {"guided_regex": "[^\\s\\S]"},
    "no grammar": {"guided_grammar": "\x00\x01"},
    "an empty grammar": {"guided_grammar": " "},
    "an unsatisfiable schema": {"guided_json": {"type": "integer", "minimum": 3, "maximum": 1}},
    "a tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
}


@pytest.mark.acceptance("A25", "hostile schemas, expressions, grammars and tools, each behind a good one")
async def test_hostile_ones_are_400s_in_time_and_the_next_good_one_is_served(server: Server) -> None:
    good = {"messages": USER, "response_format": SIMPLE, "max_tokens": 2}
    assert (await server.http.post(CHAT, json=good)).status_code == 200
    for name, fields in HOSTILE.items():
        watch = Stopwatch()
        reply = await server.http.post(CHAT, json={"messages": USER, **fields})
        assert reply.status_code == 400, name
        assert watch.seconds < 30, name  # two seconds on a quiet machine
        assert len(reply.content) < 1_000
    server.context.grammars._verdicts.clear()
    assert (await server.http.post(CHAT, json=good)).status_code == 200
