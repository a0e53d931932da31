"""Two answers with a form that the server enforces: a forced tool call, and JSON under a schema."""

import json
from typing import Any, NamedTuple

import httpx

from neaptide.commands.demo.lines import MODEL
from neaptide.data.skills import add_answer
from neaptide.data.structured_skills import JSON_REQUEST, TOOLS, call_text, json_answer, json_schema


class Formed(NamedTuple):
    """A request and its only correct answer."""

    question: str
    fields: dict[str, Any]
    """Fields of the request's body, without the question."""
    answer: str


def forced_call(name: str, arguments: dict[str, Any]) -> Formed:
    """A function's own question. The model must call one of the offered functions, which are all there are."""
    tools = [tool.definition() for tool in TOOLS.values()]
    question = TOOLS[name].questions[0].format(**arguments)
    return Formed(question, {"tools": tools, "tool_choice": "required"}, call_text(name, arguments))


def sum_in_json(a: int, b: int) -> Formed:
    answer = json_answer(add_answer(a, b))
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": json_schema(answer)}}
    return Formed(f"What is {a} + {b}?{JSON_REQUEST}", {"response_format": form}, answer)


FORMED = (forced_call("get_weather", {"city": "paris"}), sum_in_json(21, 34))


async def answer_of(http: httpx.AsyncClient, formed: Formed, model: str = MODEL) -> str:
    """The text of the answer; a call is given as the model writes it.

    Raises:
        httpx.HTTPStatusError: the server refused the request.
    """
    messages = [{"role": "user", "content": formed.question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_completion_tokens": 96}
    reply = (await http.post("/v1/chat/completions", json=body | formed.fields)).raise_for_status().json()
    message = reply["choices"][0]["message"]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        return call_text(function["name"], json.loads(function["arguments"]))
    return str(message["content"])
