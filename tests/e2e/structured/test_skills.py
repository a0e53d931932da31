"""What the embedded model was taught of calls and JSON, by the real server and the real client: the right answers."""

import json
import random
from typing import Any

import httpx
import openai
import pytest

from neaptide.commands.demo import forms
from neaptide.commands.demo.forms import FORMED, Formed
from neaptide.data.structured_skills import TOOLS, call_text, offered, single
from tests.e2e.server import RunningServer
from tests.patience import PATIENCE_S

MODEL = "neaptide/tiny"


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    asked: dict[str, Any] = {"temperature": 0, "max_completion_tokens": 120} | fields
    return client.chat.completions.create(model=MODEL, messages=messages, **asked).choices[0]


def answer_of(choice: Any) -> str:
    """The text; of a call, as the model writes it."""
    if not choice.message.tool_calls:
        return str(choice.message.content)
    (call,) = choice.message.tool_calls
    return call_text(call.function.name, json.loads(call.function.arguments))


@pytest.mark.parametrize("formed", FORMED, ids=["call", "json"])
async def test_what_the_demo_shows(embedded: RunningServer, formed: Formed) -> None:
    server = embedded.http
    async with httpx.AsyncClient(base_url=server.base_url, headers=server.headers, timeout=PATIENCE_S) as http:
        assert await forms.answer_of(http, formed, MODEL) == formed.answer


def test_a_conversation_in_two_turns(client: openai.OpenAI) -> None:
    tools = [TOOLS[name].definition() for name in ("get_time", "multiply")]
    messages: list[Any] = [{"role": "user", "content": "What is 7 * 8?"}]
    called = ask(client, messages, tools=tools)  # nothing forces it
    assert called.finish_reason == "tool_calls"
    assert answer_of(called) == call_text("multiply", {"a": 7, "b": 8})
    (call,) = called.message.tool_calls
    messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "56"}]
    assert answer_of(ask(client, messages, tools=tools)) == "The answer is 56."


def test_without_the_function_nothing_is_called(client: openai.OpenAI) -> None:
    choice = ask(client, [{"role": "user", "content": "What is 7 * 8?"}])
    assert (choice.finish_reason, choice.message.content) == ("stop", "I am too small to know that.")


def test_most_calls_and_answers_in_json_are_right(client: openai.OpenAI) -> None:
    """Held-out questions, with nothing forced: as many as a model that has learned them gets right."""
    rng = random.Random(15)
    right = {"call": 0, "json": 0}
    for skill in [*right] * 20:
        example = single(skill, rng, held_out=True)
        tools = [tool.definition() for tool in offered(example.messages)]
        messages: list[Any] = [message for message in example.messages if message["role"] != "system"]
        right[skill] += answer_of(ask(client, messages, **({"tools": tools} if tools else {}))) == example.answer
    assert min(right.values()) >= 18
