"""Streams as the official Go client reads them: its rules, from several of its versions, and always the strictest.

An event ends at an empty line, which ends one even where no data came; data that is no JSON is an error. A stream ends
with data that begins with ``[DONE]``. A member ``error`` of the data's object ends it as failed, null included. A line
is at most 64 KiB long in older versions.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.scripted import make_model
from tests.e2e.server import RunningServer

MODEL = "scripted"
MAX_LINE_BYTES = 64 << 10
QUESTION = "Weather in Cologne?"
ANSWER = "It rains." + "\u2028\x85\x1d" + " Über all. " * 20
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "K\u00f6ln", "note": "\u2029"}}</tool_call>'
SCRIPT = [
    {"after": "", "say": f"Hm.</think>{ANSWER}"},
    {"after": QUESTION, "say": f"I look it up.</think>{CALL}"},
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


class GoStreamError(Exception):
    """The reader would return an error."""


def read_events(raw: bytes) -> Iterator[tuple[str, Any]]:
    """Names and data of the events up to the end. Raises GoStreamError where the reader fails."""
    name, data, is_done = "", b"", False
    for line in raw.split(b"\n")[:-1]:
        line = line.removesuffix(b"\r")
        if len(line) >= MAX_LINE_BYTES:
            raise GoStreamError("token too long")
        if line:
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"event":
                name = value.decode()
            elif field == b"data":
                data += value + b"\n"
            continue
        if is_done:
            raise GoStreamError("events after the end")
        is_done = data.startswith(b"[DONE]")
        if not is_done:
            yield name, _value(data)
        name, data = "", b""
    if not is_done:
        raise GoStreamError("the stream just ends")


def _value(data: bytes) -> Any:
    try:
        value = json.loads(data)
    except ValueError:
        raise GoStreamError(f"no JSON: {data!r}") from None
    if "error" in value:
        raise GoStreamError(f"received error while streaming: {value['error']}")
    return value


@pytest.mark.parametrize(
    "raw",
    [
        b": keep-alive\n\ndata: {}\n\ndata: [DONE]\n\n",
        b'data: {"error": null}\n\ndata: [DONE]\n\n',
        b"data: {}\n\n",
        b"data: {}\n\ndata: [DONE]\n\ndata: {}\n\n",
        b'data: {"a": "' + b"x" * MAX_LINE_BYTES + b'"}\n\ndata: [DONE]\n\n',
    ],
    ids=["comment", "error", "end", "after", "line"],
)
def test_the_reader_refuses_what_the_client_refuses(raw: bytes) -> None:
    with pytest.raises(GoStreamError):
        list(read_events(raw))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It sends comments between events, since it is told to keep streams alive that are silent for 2 ms."""
    directory = tmp_path_factory.mktemp("go")
    model = make_model(directory / MODEL, SCRIPT)
    flags = ["--executor", "sim", "--sim-step-ms", "1", "--stream-keep-alive-s", "0.002"]
    with RunningServer(directory, str(model), *flags) as server:
        yield server


def _stream(server: RunningServer, path: str, **body: Any) -> bytes:
    reply = server.http.post(path, json={"model": MODEL, "stream": True, **body})
    assert reply.status_code == 200
    media_type, _, _ = reply.headers["content-type"].partition(";")
    assert media_type == "text/event-stream"
    assert b": keep-alive\n" in reply.content
    return reply.content


@pytest.mark.parametrize("question", ["Go on.", QUESTION])
def test_chats(server: RunningServer, question: str) -> None:
    body = {"messages": [{"role": "user", "content": question}], "stream_options": {"include_usage": True}}
    chunks = [data for name, data in read_events(_stream(server, "/v1/chat/completions", tools=[CHAT_TOOL], **body))]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    content = "".join(delta.get("content") or "" for delta in deltas)
    calls = [part for delta in deltas for part in delta.get("tool_calls", ())]
    arguments = "".join(part["function"]["arguments"] for part in calls)
    if question == QUESTION:
        assert (content, json.loads(arguments)) == ("", {"city": "Köln", "note": "\u2029"})
    else:
        assert (content, calls) == (ANSWER, [])
    assert chunks[-1]["usage"]["completion_tokens"] > 10


def test_completions(server: RunningServer) -> None:
    chunks = [data for _, data in read_events(_stream(server, "/v1/completions", prompt="Go on.", max_tokens=50))]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]).startswith("Hm.")


def test_responses(server: RunningServer) -> None:
    events = list(read_events(_stream(server, "/v1/responses", input=QUESTION, tools=[TOOL])))
    assert all(name == data["type"] for name, data in events)
    assert events[0][0] == "response.created"
    last = events[-1][1]
    assert [item["type"] for item in last["response"]["output"]] == ["reasoning", "function_call"]
    arguments = [data["delta"] for name, data in events if name == "response.function_call_arguments.delta"]
    assert "".join(arguments) == last["response"]["output"][1]["arguments"]
    assert len(arguments) > 3


def test_the_last_event_of_a_response_repeats_the_answer(server: RunningServer) -> None:
    events = list(read_events(_stream(server, "/v1/responses", input="Go on.")))
    (message,) = [item for item in events[-1][1]["response"]["output"] if item["type"] == "message"]
    assert message["content"][0]["text"] == ANSWER


def test_an_error_before_the_stream_is_no_stream(server: RunningServer) -> None:
    reply = server.http.post("/v1/chat/completions", json={"model": MODEL, "stream": True, "messages": []})
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
    with pytest.raises(httpx.HTTPStatusError):
        reply.raise_for_status()
