"""``POST /v1/responses`` with the real client: text, items, tools, formats, events, batches."""

import json
from itertools import groupby
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal

MODEL = "neaptide/tiny"
QUESTION = "What is 21 + 34?"
TOOL: Any = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


class Side(pydantic.BaseModel):
    side: Literal["left", "right"]


def test_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=40
    )
    reply = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40)
    assert reply.output_text == chat.choices[0].message.content
    assert (reply.status, reply.error, reply.incomplete_details) == ("completed", None, None)
    assert reply.id.startswith("resp_")
    assert reply.usage is not None
    assert chat.usage is not None
    assert reply.usage.input_tokens == chat.usage.prompt_tokens
    assert reply.usage.total_tokens == chat.usage.total_tokens


def test_instructions_and_items_are_the_conversation(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": QUESTION},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    parts = [{"type": "input_text", "text": QUESTION}]
    items: list[Any] = [*messages[1:3], {"type": "message", "role": "user", "content": parts}]
    reply = client.responses.create(
        model=MODEL, instructions="Be brief.", input=items, temperature=0, max_output_tokens=20
    )
    assert reply.output_text == chat.choices[0].message.content


def test_events_build_the_response(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 40}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[-1].type == "response.completed"
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    reply = client.responses.parse(model=MODEL, input=QUESTION, text_format=Side)
    assert isinstance(reply.output_parsed, Side)
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Side) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Side)


def test_an_answer_that_was_cut_is_incomplete(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, "text": {"format": {"type": "json_object"}}}
    reply = client.responses.create(**asked, max_output_tokens=2)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**asked, max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


def test_a_call_and_what_came_of_it(client: openai.OpenAI) -> None:
    forced: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}}
    reply = client.responses.create(model=MODEL, input=QUESTION, **forced)
    (call,) = reply.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["a"] in (1, 2)
    said: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "55"}
    items: list[Any] = [{"role": "user", "content": QUESTION}, call, said]
    again = client.responses.create(model=MODEL, input=items, tools=[TOOL], max_output_tokens=30)
    assert again.status in ("completed", "incomplete")


def test_events_of_a_call(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, tools=[TOOL], tool_choice="required") as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    kinds = [kind.removeprefix("response.") for kind, _ in groupby(types)]  # arguments come in several deltas
    assert kinds[2:6] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert final.output[0].type == "function_call"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"temperature": 3}, "temperature"),
        ({"input": "word " * 9000}, "input"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_own_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": MODEL, "input": QUESTION, "extra_body": fields})
    assert refused.value.param == param


def test_a_batch_of_responses(embedded: RunningServer) -> None:
    body = {"model": MODEL, "input": QUESTION, "max_output_tokens": 5, "temperature": 0}
    form = {"type": "json_schema", "name": "side", "schema": Side.model_json_schema() | {"additionalProperties": False}}
    formed = {"model": MODEL, "input": QUESTION, "text": {"format": form}}
    called = {"model": MODEL, "input": QUESTION, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    bodies = [body, {**body, "background": True}, formed, {**called, "parallel_tool_calls": False}]
    batch = wait_terminal(embedded, submit_batch(embedded, bodies, "/v1/responses"))
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    lines = sorted(result_lines(embedded, batch), key=lambda line: str(line["custom_id"]))
    good, bad, of_a_form, of_a_call = (line["response"]["body"] for line in lines)
    assert good["object"] == "response"
    assert bad["error"]["param"] == "background"
    Side.model_validate_json(of_a_form["output"][0]["content"][0]["text"])
    (call,) = of_a_call["output"]
    assert (call["type"], set(json.loads(call["arguments"]))) == ("function_call", {"a"})
    used = sum(reply["usage"]["output_tokens"] for reply in (good, of_a_form, of_a_call))
    assert batch["usage"]["output_tokens"] == used
