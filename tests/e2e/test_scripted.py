"""Outputs of real models, said by a scripted checkpoint: both processes, real sockets, the real client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.scripted import make_model
from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal

MODEL = "scripted"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "Weather in Cologne?"}]
ARGUMENTS = '{"city": "Cologne", "days": 2}'
THOUGHT, SECOND_THOUGHT = "I need the weather. <tool_call>{}</tool_call>?", "It rains."
SCRIPT = [
    {
        "after": "Weather in Cologne?",
        "say": f"{THOUGHT}\n</think>\n\nLet me see.\n"
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    },
    # Only if the prompt has the reasoning, the call and its result, as the template writes them.
    {
        "after": f"<think>{THOUGHT}</think>Let me see.\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call><|end|><|tool|>rain<|end|>',
        "say": f"{SECOND_THOUGHT}\n</think>\n\nTake an umbrella.",
    },
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("scripted")
    model = make_model(directory / MODEL, SCRIPT)
    flags = ["--executor", "sim", "--sim-step-ms", "0", "--enable-auto-tool-choice", "--completion-windows", "24h,5m"]
    with RunningServer(directory, str(model), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted.base_url, api_key="EMPTY", max_retries=0) as client:
        yield client


def test_two_turns_with_a_tool_and_reasoning(client: openai.OpenAI) -> None:
    first: Any = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER]).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.\n")
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", json.loads(ARGUMENTS))
    assert first.message.reasoning_content == THOUGHT
    answered = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*QUESTION, first.message.model_dump(exclude_none=True), answered]
    second: Any = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    message = second.choices[0].message
    assert (message.content, message.reasoning_content) == ("Take an umbrella.", SECOND_THOUGHT)
    assert 0 < second.usage.completion_tokens_details.reasoning_tokens < second.usage.completion_tokens


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    reasoning, content, arguments, finish = "", "", "", None
    for chunk in client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[WEATHER], stream=True):
        choice: Any = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            arguments += part.function.arguments
        finish = choice.finish_reason or finish
    assert (reasoning, content, arguments, finish) == (THOUGHT, "Let me see.\n", ARGUMENTS, "tool_calls")


def test_two_turns_of_responses_send_the_items_back(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    asked: list[Any] = [*QUESTION]
    first = client.responses.create(model=MODEL, input=asked, tools=[tool])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    asked += [item.model_dump(exclude_none=True) for item in first.output]
    asked.append({"type": "function_call_output", "call_id": asked[-1]["call_id"], "output": "rain"})
    second = client.responses.create(model=MODEL, input=asked, tools=[tool])
    assert [item.type for item in second.output] == ["reasoning", "message"]
    assert second.output_text == "Take an umbrella."


def test_tools_may_be_strict_and_an_answer_may_have_a_schema(client: openai.OpenAI) -> None:
    """Agents ask for strict tools unless they are told otherwise. The script is what a model says under the grammar."""
    parameters = {**WEATHER["function"]["parameters"], "required": ["city", "days"], "additionalProperties": False}
    strict: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for more in ({}, {"response_format": schema}):
        reply: Any = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[strict], **more)
        assert [call.function.arguments for call in reply.choices[0].message.tool_calls] == [ARGUMENTS]


def test_a_batch_has_calls_and_reasoning(scripted: RunningServer) -> None:
    body = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER]}
    batch = wait_terminal(scripted, submit_batch(scripted, [body]))
    (result,) = result_lines(scripted, batch)
    message = result["response"]["body"]["choices"][0]["message"]
    assert message["reasoning_content"] == THOUGHT
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_a_text_prompt_is_not_parsed(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="Weather in Cologne?", max_tokens=400)
    assert reply.choices[0].text.startswith(THOUGHT)
    assert "<tool_call>" in reply.choices[0].text
