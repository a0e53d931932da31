"""Responses through the real client: events in their order, errors on the way, fields by their own names."""

import json
from typing import Any

import openai
import pytest

from neaptide.server.openai.endpoints import RESPONSES
from neaptide.server.openai.responses.sealing import seal
from neaptide.server.openai.responses.translate import FIELDS_OF_CHATS
from neaptide.server.parsers.choose import choose_parsers
from neaptide.server.text.tokenizer import Tokenizer
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
    "skip_special_tokens": False,
    "include_reasoning": False,
    "add_generation_prompt": False,
    "reasoning_effort": "low",
}


@pytest.mark.parametrize("name", sorted(FIELDS_OF_CHATS))
async def test_fields_of_chats_are_refused_and_not_passed_over(server: Server, name: str) -> None:
    reply = await server.http.post(RESPONSES, json={"input": QUESTION, name: SOMETHING.get(name, "x")})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)


async def test_fields_of_chats_that_ask_for_nothing_are_taken(server: Server) -> None:
    server.engine.script = [20]
    nothing: dict[str, Any] = {"skip_special_tokens": True, "include_reasoning": True, "n": 1, "stop": [], "min_p": 0}
    nothing |= {"echo": False, "min_tokens": 0, "logit_bias": {}, "repetition_penalty": 1, "functions": None}
    assert (await server.http.post(RESPONSES, json={"input": QUESTION} | nothing)).status_code == 200


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
        ({"instructions": "Be brief.", "input": [{**CALLED_WITH, "name": None}]}, "input.0.name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "regex": "a"}}}, "text.format.regex"),
    ],
)
async def test_places_are_named_as_they_are_here(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = await server.http.post(RESPONSES, json={"input": QUESTION, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_a_choice_in_the_form_of_chats_is_told_this_one(server: Server) -> None:
    choice = {"type": "function", "function": {"name": TOOL["name"]}}
    reply = await server.http.post(RESPONSES, json={"input": QUESTION, "tools": [TOOL], "tool_choice": choice})
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("missing_required_parameter", "tool_choice.name")
    assert error["message"].endswith('In responses a function is named as {"type": "function", "name": "..."}.')


async def test_arguments_that_a_model_wrote_go_back_as_they_are(server: Server) -> None:
    said = '{"a": 1, "a": 123456789012345678901234567890, "b": 1e999}'
    answered = {"type": "function_call_output", "call_id": "c", "output": "55"}
    items = [{"role": "user", "content": QUESTION}, {**CALLED_WITH, "arguments": said}, answered]
    reply = await server.http.post(RESPONSES, json={"input": items, "tools": [TOOL], "max_output_tokens": 1})
    assert reply.status_code == 200
    prompt = server.context.tokenizer.decode(server.engine.requests[0].prompt_token_ids)
    assert '{"a": 123456789012345678901234567890, "b": 1.7976931348623157e+308}' in prompt


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}],
}
DONE = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "55"}]}


async def test_sealed_reasoning_goes_back_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients send back only what OpenAI calls encrypted. Another server's is passed over."""
    seen: list[Any] = []

    def note(self: Tokenizer, messages: Any, **more: Any) -> list[int]:
        seen.append(messages[-2])
        return [7]

    monkeypatch.setattr(Tokenizer, "encode_chat", note)
    sealed = seal("Hm, für 55.")
    told = {"type": "summary_text", "text": "A sum."}
    for encrypted, summary in ((sealed, [told]), (sealed, []), ("gAAA", [told]), (sealed[:-1], [told]), (None, [told])):
        item = {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": encrypted}
        items = [{"role": "user", "content": QUESTION}, item, SAID, {"role": "user", "content": QUESTION}]
        assert (await server.http.post(RESPONSES, json={"input": items, "max_output_tokens": 1})).status_code == 200
    assert [message["reasoning_content"] for message in seen] == ["Hm, für 55."] * 2 + ["A sum."] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_sealed_if_that_is_asked(server: Server, stream: bool) -> None:
    server.context.parsers = choose_parsers("hermes", "qwen3", None, ())
    server.engine.script = server.context.tokenizer.encode("<think>A sum.</think>55")
    for include in ([], ["reasoning.encrypted_content"]):
        asked: Any = {"model": MODEL_ID, "input": QUESTION, "include": include}
        if stream:
            events = [event async for event in await server.openai.responses.create(stream=True, **asked)]
            output = events[-1].response.output  # type: ignore[union-attr]
        else:
            output = (await server.openai.responses.create(**asked)).output
        assert output[0].type == "reasoning"
        assert output[0].encrypted_content == (seal("A sum.") if include else None)


async def test_a_reference_to_a_stored_item_is_refused_with_the_way_out(server: Server) -> None:
    items = [{"role": "user", "content": QUESTION}, {"type": "item_reference", "id": "rs_1"}]
    reply = await server.http.post(RESPONSES, json={"input": items})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input.1.type")
    assert "send them whole" in reply.json()["error"]["message"]


async def test_items_go_back_as_they_came(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(self: Tokenizer, messages: Any, **more: Any) -> list[int]:
        seen.append((messages, more["continued"]))
        return [7]

    monkeypatch.setattr(Tokenizer, "encode_chat", note)
    refused = {**SAID, "content": [{"type": "refusal", "refusal": "No."}]}
    turns = [THOUGHT, SAID, {**CALLED_WITH, "arguments": '{"a": '}, DONE, THOUGHT, {**CALLED_WITH, "arguments": "{}"}]
    cut = {**SAID, "status": "incomplete"}
    for last in (refused, cut, THOUGHT | {"status": "incomplete"}):
        items = [{"role": "user", "content": QUESTION}, *turns, DONE, last]
        reply = await server.http.post(RESPONSES, json={"input": items, "tools": [TOOL], "max_output_tokens": 1})
        assert reply.status_code == 200
    messages = seen[0][0]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {}}}
    assert messages[1:4] == [
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "55", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
    ]
    assert messages[-1] == {"role": "assistant", "content": "No."}
    assert [continued for _, continued in seen] == [None, "content", "reasoning_content"]
