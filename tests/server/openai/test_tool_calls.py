"""Tool calls in the model's output: found, bounded, and shaped as the API has them."""

import json
import time
from typing import Any

import pytest

from neaptide.server.parsers.calls import Offer
from neaptide.server.parsers.core import MAX_CALL_CHARS, OutputParser, ToolFormat
from neaptide.server.parsers.formats import HERMES, LLAMA3, MISTRAL
from tests.server.conftest import MODEL_ID, USER, Server

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAMES = frozenset({"weather", "add"})
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in sorted(NAMES)]
WEATHER = OPEN + '\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n' + CLOSE
ADD = OPEN + '{"name": "add", "arguments": {}}' + CLOSE


def parse(*pieces: str, form: ToolFormat = HERMES, **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    text, calls = written_calls(*pieces, form=form, **options)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def written_calls(*pieces: str, form: ToolFormat = HERMES, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    parser = OutputParser(None, form, Offer(NAMES), **options)
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(part.content for part in parts), [(call.name, call.arguments) for call in parser.calls]


def test_a_call_leaves_the_text() -> None:
    assert parse(WEATHER) == ("", [("weather", {"city": "Köln", "days": 2})])


def test_text_before_and_after_calls_is_kept_without_the_white_space_of_the_notation() -> None:
    assert parse("\n" + WEATHER + "\n" + ADD + "\n") == ("", [("weather", {"city": "Köln", "days": 2}), ("add", {})])
    assert parse("Let me see. " + ADD + "\nDone.") == ("Let me see. \nDone.", [("add", {})])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_of_any_size_give_the_same(size: int) -> None:
    text = "  < a <tool " + WEATHER + " " + OPEN + "broken" + CLOSE + ADD + " </tool"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(*pieces) == parse(text)
    assert [name for name, _ in parse(text)[1]] == ["weather", "add"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "no call at all",
        "a < b",
        OPEN,
        CLOSE,
        OPEN + CLOSE,
        OPEN + "weather()" + CLOSE,
        OPEN + '["weather", {}]' + CLOSE,
        OPEN + '{"arguments": {}}' + CLOSE,
        OPEN + '{"name": "delete_everything", "arguments": {}}' + CLOSE,
        OPEN + '{"name": ["weather"], "arguments": {}}' + CLOSE,
        OPEN + '{"name": "weather", "arguments": "sunny"}' + CLOSE,
        OPEN + '{"name": "weather", "name": "add", "arguments": {}}' + CLOSE,
        OPEN + '{"name": "weather", "arguments": [1]}' + CLOSE,
        OPEN + "x" * (3 * MAX_CALL_CHARS),
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse(text) == (text, [])
    assert parse(*text) == (text, [])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"x": NaN}}', '{"x": NaN}'),
        ('{"x": "\\ud800"}}', '{"x": "\\ud800"}'),
        ('{"x": 1 "y" 2}}', '{"x": 1 "y" 2}'),
        ('{"x": "say "hi", {it} is" }}', '{"x": "say "hi", {it} is" }'),
        ('{"x": 1', '{"x": 1'),
        ('{"x": [1}', '{"x": [1}'),
        ('{"x": ' + "[" * 96, '{"x": ' + "[" * 95),
        ('{"x": "' + "y" * MAX_CALL_CHARS + '"}}', '{"x": "' + "y" * MAX_CALL_CHARS + '"}'),
    ],
)
def test_arguments_that_are_no_json_come_as_the_model_wrote_them(written: str, arguments: str) -> None:
    """They were on their way before that could be known. What cannot belong to them is content."""
    text = OPEN + '{"name": "weather", "arguments": ' + written + CLOSE + " So."
    for pieces in ([text], list(text)):
        content, calls = written_calls(*pieces)
        assert (content.removeprefix("["), calls) == (" So.", [("weather", arguments)])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"x": True, "y": [None, False], "Truely": 1}', '{"x": true, "y": [null, false], "Truely": 1}'),
        ('{"x": "two\nlines\tand \x01"}', '{"x": "two\\nlines\\tand \\u0001"}'),
        ('{"x": "\\d+ isn\\\'t \\\nso"}', '{"x": "\\\\d+ isn\'t \\nso"}'),
        ("""{"x": 'a "b"', "y": "it's"}""", """{"x": "a \\"b\\"", "y": "it's"}"""),
        ('{"x": [1, 2, ], "y": 3, }', '{"x": [1, 2 ], "y": 3 }'),
        ('{"x": "</tool_call>, <tool_call>"}', '{"x": "</tool_call>, <tool_call>"}'),
    ],
)
def test_what_json_forbids_and_models_write_becomes_json(written: str, arguments: str) -> None:
    text = OPEN + '{"name": "weather", "arguments": ' + written + "}" + CLOSE
    json.loads(arguments)
    assert written_calls(text) == ("", [("weather", arguments)])
    assert written_calls(*text) == ("", [("weather", arguments)])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (OPEN + '{"name": "add", "arguments": {}, "why": "so"}' + CLOSE + "Yes.", "Yes."),
        (OPEN + '{"name": "add", "arguments": {}}}' + CLOSE, ""),
        (OPEN + '{"name": "add", "arguments": {}' + CLOSE, ""),
        (OPEN + '{"name": "add", "arguments": {}}, {"name": "evil"}' + CLOSE, '{"name": "evil"}'),
        (OPEN + '{"name": "add", "arguments": {}} as you say' + CLOSE + "!", "as you say!"),
    ],
)
def test_what_follows_the_arguments(text: str, content: str) -> None:
    """Further members and closing brackets belong to the notation, other text is content."""
    for pieces in ([text], list(text)):
        assert written_calls(*pieces) == (content, [("add", "{}")])


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": 1, "x": 2}',
        '{"x": {"y": 1, "y": [{"z": 1, "z": 2}]}}',
        '{"x": 1e999, "y": -1e999}',
        '{"x": ' + "9" * 5000 + "}",
        '{"name": "add", "arguments": {}, "name": 1}',
    ],
)
def test_whatever_json_lets_pass_is_an_argument(arguments: str) -> None:
    """The grammar of a forced call lets it pass, too: as text it would be no call where one was required."""
    for form, text in (
        (HERMES, OPEN + '{"name": "add", "arguments": ' + arguments + "}" + CLOSE),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": ' + arguments + "}]"),
        (LLAMA3, '{"name": "add", "parameters": ' + arguments + "}"),
    ):
        assert written_calls(text, form=form) == ("", [("add", arguments)])


def test_calls_beyond_the_limit_are_left_out() -> None:
    assert parse(ADD * 3, max_calls=1) == ("", [("add", {})])


@pytest.mark.parametrize("unit", [OPEN, OPEN + CLOSE, ADD, "<", " "])
def test_time_grows_with_the_length_alone(unit: str) -> None:
    def seconds(chars: int, piece: int) -> float:
        text = (unit * chars)[:chars]
        times = []
        for _ in range(2):
            parser, start_s = OutputParser(None, HERMES, Offer(NAMES)), time.process_time()
            for begin in range(0, chars, piece):
                parser.push(text[begin : begin + piece])
            parser.finish()
            times.append(time.process_time() - start_s)
        return min(times)

    for piece in (5, 1 << 20):
        # 32 times the text. A quadratic parser needs 1,024 times as long; neighbours of the processor cost less than
        # what lies between.
        assert seconds(1 << 17, piece) <= 256 * seconds(1 << 12, piece) + 0.02


# ---- through the API -------------------------------------------------------------------------------------


def _says(server: Server, text: str) -> None:
    server.engine.script = server.context.tokenizer.encode(text)


async def test_reply_carries_calls_instead_of_content(server: Server) -> None:
    _says(server, WEATHER + "\n" + ADD)
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS)
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    first, second = choice.message.tool_calls or []
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"city": "Köln", "days": 2})
    assert second.function.arguments == "{}"
    assert first.id.startswith("call_")
    assert first.id != second.id


async def test_stream_names_the_call_and_then_gives_its_arguments(server: Server) -> None:
    _says(server, "Wait. " + WEATHER + ADD)
    stream = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in choices) == "Wait. "
    deltas = [part for choice in choices for part in choice.delta.tool_calls or []]
    heads = [part for part in deltas if part.id]
    assert [
        (part.index, part.type, part.function and part.function.name, part.function and part.function.arguments)
        for part in heads
    ] == [(0, "function", "weather", ""), (1, "function", "add", "")]
    assert len({part.id for part in heads}) == 2
    arguments = ["", ""]
    for part in deltas:
        arguments[part.index] += (part.function and part.function.arguments) or ""
    assert arguments == ['{"city": "Köln", "days": 2}', "{}"]
    assert deltas.index(heads[1]) > 6  # The arguments came as the model wrote them.
    assert choices[-1].finish_reason == "tool_calls"
    assert choices[-1].delta.content is None


async def test_sdk_stream_helper_assembles_the_calls(server: Server) -> None:
    _says(server, WEATHER)
    async with server.openai.chat.completions.stream(model=MODEL_ID, messages=USER, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Köln", "days": 2}


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_an_offer_of_tools_nothing_is_parsed(server: Server, more: dict[str, Any]) -> None:
    _says(server, ADD)
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, **more)
    assert reply.choices[0].message.content == ADD
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_malformed_calls_stay_content(server: Server, stream: bool) -> None:
    text = " " + OPEN + '{"name": "add", "arguments": {' + CLOSE
    _says(server, text)
    body = {"messages": USER, "tools": TOOLS, "stream": stream}
    reply = await server.http.post("/v1/chat/completions", json=body)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == text
        assert choices[-1]["finish_reason"] == "stop"
    else:
        assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}


async def test_one_call_at_a_time_when_that_is_asked(server: Server) -> None:
    _says(server, WEATHER + ADD)
    reply = await server.openai.chat.completions.create(
        model=MODEL_ID, messages=USER, tools=TOOLS, parallel_tool_calls=False
    )
    assert [call.type for call in reply.choices[0].message.tool_calls or []] == ["function"]


async def test_output_cut_by_max_tokens_says_so(server: Server) -> None:
    _says(server, ADD + "and then")
    limit = len(server.context.tokenizer.encode(ADD + "and"))
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS, max_tokens=limit)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content == "and"
    assert len(reply.choices[0].message.tool_calls or []) == 1


async def test_dashboards_see_a_call_as_an_output_that_stopped(server: Server) -> None:
    _says(server, ADD)
    await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, tools=TOOLS)
    metrics = (await server.http.get("/metrics")).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total{")]
    assert 'finished_reason="stop"' in line


# ---- other families' formats -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', ("", [("add", '{"a": 1}')])),
        (
            MISTRAL,
            'So: [TOOL_CALLS] [{"name": "add"}, {"name": "weather"}]',
            ("So: ", [("add", "{}"), ("weather", "{}")]),
        ),
        (MISTRAL, '[TOOL_CALLS][{"name": "add"', ('[TOOL_CALLS][{"name": "add"', [])),
        (MISTRAL, '[TOOL_CALLS][{"name": "evil"}]', ('[TOOL_CALLS][{"name": "evil"}]', [])),
        (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
        (LLAMA3, '\n{"name": "add"}; {"name": "weather"}', ("", [("add", "{}"), ("weather", "{}")])),
        (LLAMA3, '{"name": "add", "parameters": {"a"', ("", [("add", '{"a"')])),
        (
            LLAMA3,
            '{"name": "add", "parameters": {"a": 1}}; {"name": "weather", "parameters": "{}"} So.',
            ('{"name": "weather", "parameters": "{}"} So.', [("add", '{"a": 1}')]),
        ),
        (LLAMA3, 'No: {"name": "add"}', ('No: {"name": "add"}', [])),
        (LLAMA3, '{"name": "add"}\n{"name": "weather"}', ("", [("add", "{}"), ("weather", "{}")])),
        (LLAMA3, "", ("", [])),
    ],
)
def test_calls_in_other_formats(form: ToolFormat, text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    assert written_calls(text, form=form) == expected
    assert written_calls(*text, form=form) == expected


def test_numbers_of_any_size_keep_their_text() -> None:
    arguments = '{"x": 123456789012345678901234567890, "y": 1e999}'
    body = OPEN + '{"name": "add", "arguments": ' + arguments + "}" + CLOSE
    assert written_calls(body) == ("", [("add", arguments)])
