"""Responses through the real client: events in their order, errors on the way, fields by their own names."""

import json
from typing import Any

import openai
import pytest

from neaptide.server.openai.endpoints import RESPONSES
from neaptide.server.openai.responses.bodies import FieldsOfChats
from tests.server.conftest import MODEL_ID, Server

QUESTION = "What is 2+2?"
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


async def _events(server: Server, said: str, **fields: Any) -> list[Any]:
    server.engine.script = server.context.tokenizer.encode(said)
    stream = await server.openai.responses.create(model=MODEL_ID, input=QUESTION, stream=True, **fields)
    return [event async for event in stream]


def _kinds(events: list[Any]) -> list[str]:
    """Without repetitions: text comes in any number of pieces."""
    kinds = [event.type.removeprefix("response.") for event in events]
    return [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]


BEGIN = ["created", "in_progress"]
MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALLED = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


async def test_events_of_a_text(server: Server) -> None:
    events = await _events(server, "Four.")
    assert _kinds(events) == [*BEGIN, *MESSAGE, "completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Four."
    (done,) = (event for event in events if event.type == "response.output_text.done")
    (item,) = events[-1].response.output
    assert (done.text, done.item_id, done.output_index) == ("Four.", item.id, 0)
    assert (item.status, item.content[0].text) == ("completed", "Four.")
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_events_of_text_and_a_call(server: Server) -> None:
    events = await _events(server, "Wait. " + CALL, tools=[TOOL])
    assert _kinds(events) == [*BEGIN, *MESSAGE, *CALLED, "completed"]
    message, call = events[-1].response.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == ("Wait. ", "add", {"a": 2})
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.id) for event in added] == [(0, message.id), (1, call.id)]
    assert added[1].item.arguments == ""


async def test_a_call_that_was_cut_is_an_incomplete_item(server: Server) -> None:
    num_tokens = len(server.context.tokenizer.encode(CALL[: CALL.index("2")]))
    events = await _events(server, CALL, tools=[TOOL], max_output_tokens=num_tokens)
    assert _kinds(events) == [*BEGIN, *CALLED, "incomplete"]
    response = events[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = response.output
    assert (item.type, item.name, item.arguments.rstrip(), item.status) == (
        "function_call",
        "add",
        '{"a":',
        "incomplete",
    )


async def test_a_failure_on_the_way_is_raised_by_the_client(server: Server) -> None:
    server.engine.fail_after = 2
    with pytest.raises(openai.APIError) as raised:
        await _events(server, "Four and a half.")
    assert raised.value.code == "engine_error"
    assert "secret" not in str(raised.value)


async def test_options_that_ask_for_nothing_are_taken(server: Server) -> None:
    nothing = {"n": 1, "repetition_penalty": 1.0, "presence_penalty": 0, "stop": [], "logprobs": False, "min_p": None}
    reply = await server.http.post(RESPONSES, json={"input": QUESTION, "max_output_tokens": 1, **nothing})
    assert reply.status_code == 200


SOMETHING: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "logprobs": True,
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "structured_outputs": {"json": {}},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "guided_whitespace_pattern": " *",
    "regex": "a",
    "ebnf": 'root ::= "a"',
    "grammar": 'root ::= "a"',
    "n": 2,
    "stop": ["a"],
    "stop_token_ids": [0],
    "min_tokens": 1,
    "ignore_eos": True,
    "min_p": 0.5,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
}


@pytest.mark.parametrize("name", FieldsOfChats.model_fields)
async def test_fields_of_chats_are_refused_and_not_passed_over(server: Server, name: str) -> None:
    reply = await server.http.post(RESPONSES, json={"input": QUESTION, name: SOMETHING[name]})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)


async def test_it_says_what_the_field_is_called_here(server: Server) -> None:
    body = {"input": QUESTION, "response_format": SOMETHING["response_format"]}
    reply = await server.http.post(RESPONSES, json=body)
    assert reply.json()["error"]["message"] == "'response_format' is not supported. Use 'text.format'."


CALLED_WITH = {"type": "function_call", "call_id": "c", "name": "add"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, {"type": "function"}]}, "tools.1.name"),
        ({"tools": [TOOL, {**TOOL, "name": "a b"}]}, "tools.1.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"instructions": "Be brief.", "input": [{**CALLED_WITH, "arguments": "[]"}]}, "input.0.arguments"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ],
)
async def test_places_are_named_as_they_are_here(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = await server.http.post(RESPONSES, json={"input": QUESTION, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_arguments_that_a_model_wrote_go_back_as_they_are(server: Server) -> None:
    said = '{"a": 1, "a": 123456789012345678901234567890, "b": 1e999}'
    answered = {"type": "function_call_output", "call_id": "c", "output": "55"}
    items = [{"role": "user", "content": QUESTION}, {**CALLED_WITH, "arguments": said}, answered]
    reply = await server.http.post(RESPONSES, json={"input": items, "tools": [TOOL], "max_output_tokens": 1})
    assert reply.status_code == 200
    prompt = server.context.tokenizer.decode(server.engine.requests[0].prompt_token_ids)
    assert '{"a": 123456789012345678901234567890, "b": 1.7976931348623157e+308}' in prompt
