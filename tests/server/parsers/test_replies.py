"""Outputs of models through the API: whole and streamed replies of the real client, over real sockets."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace as replaced
from typing import Any

import openai
import pytest

from neaptide.engine.messages import RequestOutput
from neaptide.engine.params import FinishReason
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.parsers.choose import OutputParsers, choose_parsers
from neaptide.server.parsers.names import TOOL_PARSERS
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_ID, USER, Server, make_server
from tests.server.live import serving
from tests.server.parsers.outputs import OUTPUTS, TYPES

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}},
        },
    }
    for name, types in {**TYPES, "now": {}}.items()
]
THOUGHT = "<think>\nThe user wants 4. Perhaps <tool_call>{}</tool_call>?\n</think>\n\n"


@pytest.fixture
async def live(tokenizer: Tokenizer) -> AsyncIterator[tuple[Server, openai.AsyncOpenAI]]:
    """An app that listens, and a client that reaches it by its port."""
    built = make_server(tokenizer)
    async with serving(built.app) as running:
        base_url = f"http://127.0.0.1:{running.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="EMPTY", max_retries=0) as client:
            yield built, client
    await built.openai.close()


def says(server: Server, text: str, tool_parser: str = "hermes", reasoning_parser: str = "none") -> None:
    server.engine.script = server.context.tokenizer.encode(text)
    server.context.parsers = choose_parsers(tool_parser, reasoning_parser, None, ())


async def joined(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """A streamed reply, put together from its deltas alone."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    stream = await client.chat.completions.create(model=MODEL_ID, messages=USER, stream=True, **fields)
    async for chunk in stream:
        (choice,) = chunk.choices
        message["finish_reason"] = choice.finish_reason or message["finish_reason"]
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or []:
            if part.index == len(message["tool_calls"]):
                assert part.id
                message["tool_calls"].append([part.function and part.function.name, ""])
            message["tool_calls"][part.index][1] += part.function and part.function.arguments
    return message


async def test_every_format_comes_back_as_calls(live: tuple[Server, openai.AsyncOpenAI]) -> None:
    server, client = live
    server.engine.tokens_per_output = 3
    for name, outputs in OUTPUTS.items():
        output = outputs[0]
        says(server, output.text, name)
        whole = await client.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS)
        (choice,) = whole.choices
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
        assert [(called, json.loads(arguments)) for called, arguments in calls] == list(output.calls), name
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", output.content or None)
        streamed = await joined(client, tools=TOOLS)
        assert (streamed["tool_calls"], streamed["content"]) == (calls, output.content)
        assert streamed["finish_reason"] == "tool_calls"


async def test_reasoning_stands_apart_whole_and_streamed(server: Server) -> None:
    says(server, THOUGHT + "Four.", reasoning_parser="qwen3")
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS)
    message: Any = reply.choices[0].message
    assert message.content == "Four."
    assert message.reasoning_content == THOUGHT.strip().removeprefix("<think>").removesuffix("</think>").strip()
    assert message.tool_calls is None
    streamed = await joined(server.openai, tools=TOOLS)
    assert (streamed["content"], streamed["reasoning_content"]) == ("Four.", message.reasoning_content)
    assert streamed["finish_reason"] == reply.choices[0].finish_reason == "stop"


async def test_reasoning_can_be_left_out(server: Server) -> None:
    says(server, THOUGHT + "Four.", reasoning_parser="qwen3")
    body = {"messages": USER, "include_reasoning": False}
    reply = (await server.http.post("/v1/chat/completions", json=body)).json()
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Four.", "refusal": None}
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 10


async def test_reasoning_tokens_are_counted(server: Server) -> None:
    says(server, THOUGHT + "Four.", reasoning_parser="qwen3")
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER)
    assert reply.usage
    assert reply.usage.completion_tokens_details
    # From the token that completes the first mark to the one that completes the second.
    before, after = (len(server.context.tokenizer.encode(text)) for text in ("<think", "\n\nFour."))
    reasoning_tokens = reply.usage.completion_tokens_details.reasoning_tokens
    assert reasoning_tokens == reply.usage.completion_tokens - before - after


async def test_reasoning_that_the_prompt_opens_needs_no_mark(server: Server) -> None:
    says(server, "It is 4.\n</think>\n\nFour.", reasoning_parser="qwen3")
    messages: list[Any] = [*USER, {"role": "assistant", "content": "<think>\n"}]
    body = {"model": MODEL_ID, "messages": messages, "extra_body": {"continue_final_message": True}}
    reply = await server.openai.chat.completions.create(**body)  # type: ignore[call-overload]
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "It is 4.")


async def test_a_model_without_reasoning_says_nothing_of_it(server: Server) -> None:
    says(server, "Four.", reasoning_parser="qwen3")
    reply = await server.http.post("/v1/chat/completions", json={"messages": USER})
    assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": "Four.", "refusal": None}


async def test_a_stream_that_may_call_begins_with_null(server: Server) -> None:
    says(server, OUTPUTS["hermes"][0].text)
    async with server.openai.chat.completions.stream(model=MODEL_ID, messages=USER, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_stream_of_a_forced_call_has_no_content(server: Server, choice: Any, is_cut: bool) -> None:
    """Not even an empty one, and what the limit cut is no text."""
    text = OUTPUTS["hermes"][0].text
    says(server, text)
    limit = len(server.context.tokenizer.encode(text[: text.index("ln")])) if is_cut else 200
    body = {"messages": USER, "tools": TOOLS, "tool_choice": choice, "max_tokens": limit, "stream": True}
    reply = await server.http.post("/v1/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events]
    assert [one["delta"].get("content") for one in choices] == [None] * len(choices)
    arguments = "".join(part["function"]["arguments"] for one in choices for part in one["delta"].get("tool_calls", ()))
    assert '{"city": "K' in arguments
    assert choices[-1]["finish_reason"] == ("length" if is_cut else "tool_calls")


async def test_a_call_that_the_limit_cut_is_returned_as_far_as_it_goes(server: Server) -> None:
    first, second = OUTPUTS["hermes"][0].text, OUTPUTS["hermes"][0].text
    says(server, first + "\n" + second)
    limit = len(server.context.tokenizer.encode(first + "\n" + second[: second.index("ln")]))
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS, max_tokens=limit)
    (choice,) = reply.choices
    calls: Any = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert calls[0].function.arguments.startswith(calls[1].function.arguments)
    assert len(calls[1].function.arguments) < len(calls[0].function.arguments)


async def test_mistrals_own_ids_are_kept_and_new_ones_have_its_length(server: Server) -> None:
    for output in OUTPUTS["mistral"]:
        says(server, output.text, "mistral")
        reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS)
        ids = [call.id for call in reply.choices[0].message.tool_calls or []]
        assert all(len(one) == 9 and one.isalnum() for one in ids)
        assert list(output.ids) in ([], ids)


async def test_special_tokens_that_are_marks_are_read(server: Server) -> None:
    """The tokenizer's own ``<|tool|>`` stands for a family's mark that is a special token."""
    form = TOOL_PARSERS["jamba"]
    assert form is not None
    server.context.parsers = OutputParsers(
        tools=replaced(form, sections=(replaced(form.sections[0], begin="<|tool|>", ends=("<|user|>",)),))
    )
    server.engine.script = server.context.tokenizer.encode('<|tool|>[{"name": "now", "arguments": {}}]<|user|>')
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS)
    assert [call.id[:5] for call in reply.choices[0].message.tool_calls or []] == ["call_"]
    plain = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER)
    assert plain.choices[0].message.content == '[{"name": "now", "arguments": {}}]'


async def test_responses_have_reasoning_as_an_item(server: Server) -> None:
    says(server, THOUGHT + "Wait. " + OUTPUTS["hermes"][0].text, reasoning_parser="qwen3")
    tools: list[Any] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    whole = await server.openai.responses.create(model=MODEL_ID, input="What?", tools=tools)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    reasoning: Any = whole.output[0]
    assert reasoning.content[0].text.startswith("The user wants 4.")
    assert whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens > 10
    stream = await server.openai.responses.create(model=MODEL_ID, input="What?", tools=tools, stream=True)
    events: list[Any] = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == reasoning.content[0].text
    streamed = events[-1].response
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    assert streamed.output[0].content == reasoning.content
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("tokens_per_output", [1, 2, 3, 7, 1000])
async def test_streamed_responses_have_the_calls_whatever_comes_at_once(server: Server, tokens_per_output: int) -> None:
    output = OUTPUTS["hermes"][1]
    says(server, f"Wait. {output.text}\nSo.")
    server.engine.tokens_per_output = tokens_per_output
    tools: list[Any] = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    stream = await server.openai.responses.create(model=MODEL_ID, input="What?", tools=tools, stream=True)
    events: list[Any] = [event async for event in stream]
    items = [item for item in events[-1].response.output if item.type == "function_call"]
    assert [(item.name, json.loads(item.arguments)) for item in items] == list(output.calls)
    for item in items:
        deltas = [event.delta for event in events if getattr(event, "item_id", "") == item.id and "delta" in event.type]
        assert "".join(deltas) == item.arguments


async def test_a_batch_line_has_the_same_reply(server: Server) -> None:
    says(server, "", "glm45", "qwen3")
    text = THOUGHT + OUTPUTS["glm45"][0].text
    compiler = ContextCompiler(server.context)
    line = compiler.compile("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    assert line.reply is not None
    server.engine.script = server.context.tokenizer.encode(text)
    online = await server.http.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})
    assembler: Any = compiler.stored_assembler(line.reply)
    assembler.feed(0, RequestOutput("a", server.engine.script, finish_reason=FinishReason.STOP))
    mine, theirs = assembler.body("x")["choices"][0]["message"], online.json()["choices"][0]["message"]
    for message in (mine, theirs):
        for call in message["tool_calls"]:
            del call["id"]
    assert mine == theirs
    assert mine["reasoning_content"]
