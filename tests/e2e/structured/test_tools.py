"""Calls of functions through the real server and the real client: their shape, not the model's wisdom."""

import json
from typing import Any

import jsonschema_rs
import openai
import pytest

MODEL = "neaptide/tiny"
QUESTION: list[Any] = [{"role": "user", "content": "What is 21 + 34?"}]
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["m", "km"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
}
SHOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
PARAMETERS = {"add": ADD, "show": SHOW}


def tools(**more: Any) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters, **more}}
        for name, parameters in PARAMETERS.items()
    ]


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked: dict[str, Any] = {"messages": QUESTION, "tools": tools(), "max_tokens": 200, "seed": 5} | fields
    return client.chat.completions.create(model=MODEL, **asked).choices[0]


def assert_calls(choice: Any) -> list[str]:
    """Returns the functions' names."""
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    for call in choice.message.tool_calls:
        schema = PARAMETERS[call.function.name]
        jsonschema_rs.validator_for(schema).validate(json.loads(call.function.arguments))
    return [call.function.name for call in choice.message.tool_calls]


def test_a_named_function_is_called_once(client: openai.OpenAI) -> None:
    for name in PARAMETERS:
        assert assert_calls(ask(client, tool_choice={"type": "function", "function": {"name": name}})) == [name]


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_is_at_least_one_call(client: openai.OpenAI, temperature: float) -> None:
    choice = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=temperature)
    assert len(assert_calls(choice)) == 1


def test_a_stream_brings_the_same_call(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    whole = ask(client, **fields)
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=tools(), max_tokens=200, seed=5, **fields
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    assert assert_calls(choice) == assert_calls(whole)
    assert choice.message.tool_calls is not None
    (streamed,), (expected,) = choice.message.tool_calls, whole.message.tool_calls
    assert streamed.function.arguments == expected.function.arguments


def test_a_call_that_was_cut_is_partial_and_says_so(client: openai.OpenAI) -> None:
    whole = ask(client, tool_choice={"type": "function", "function": {"name": "add"}})
    cut = ask(client, tool_choice={"type": "function", "function": {"name": "add"}}, max_tokens=14)
    (mine,), (theirs,) = cut.message.tool_calls, whole.message.tool_calls
    assert (cut.finish_reason, cut.message.content, mine.function.name) == ("length", None, "add")
    assert len(mine.function.arguments) < len(theirs.function.arguments)
    assert theirs.function.arguments.startswith(mine.function.arguments)


def test_strict_tools_leave_free_text_possible(client: openai.OpenAI) -> None:
    free = ask(client, tools=None, temperature=0)
    strict = ask(client, tools=tools(strict=True), temperature=0)
    assert (strict.finish_reason, strict.message.content) == (free.finish_reason, free.message.content)


def test_a_format_beside_tools_lets_the_model_answer_or_call(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ADD}}
    choice = ask(client, response_format=form, tools=tools(strict=True), parallel_tool_calls=False)
    if choice.message.tool_calls:
        assert_calls(choice)
    else:
        jsonschema_rs.validator_for(ADD).validate(json.loads(choice.message.content))


def test_a_conversation_goes_on_behind_a_call(client: openai.OpenAI) -> None:
    called = ask(client, tool_choice={"type": "function", "function": {"name": "add"}})
    (call,) = called.message.tool_calls
    messages = [*QUESTION, called.message, {"role": "tool", "tool_call_id": call.id, "content": "55"}]
    assert ask(client, messages=messages).finish_reason in ("stop", "length", "tool_calls")


def test_parameters_that_cannot_be_held_name_the_keyword(client: openai.OpenAI) -> None:
    bad: Any = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="'not'") as refused:
        ask(client, tools=[bad])
    assert refused.value.param == "tools"
