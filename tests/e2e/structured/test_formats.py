"""Structured output through the real server and the real client: whatever a model says, it has the form asked for."""

import re
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal

MODEL = "neaptide/tiny"
QUESTION: list[Any] = [{"role": "user", "content": "What is 21 + 34?"}]


class Point(pydantic.BaseModel, extra="forbid"):
    label: Literal["north", "south"]
    x: int = pydantic.Field(ge=0, le=99)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


SCHEMA: dict[str, Any] = Point.model_json_schema()
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": SCHEMA, "strict": True}}


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Point, max_tokens=300)
    assert isinstance(reply.choices[0].message.parsed, Point)
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_choice_is_valid_and_a_stream_says_the_same(client: openai.OpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "response_format": FORMAT, "seed": 7}
    asked |= {"temperature": temperature, "n": 3, "max_tokens": 300}
    whole = client.chat.completions.create(**asked)
    texts = [""] * 3
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == texts
    for text in texts:
        Point.model_validate_json(text)


def test_a_cut_answer_says_that_it_was_cut(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=FORMAT, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"


def test_stop_strings_and_logprobs_keep_their_meaning(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format=FORMAT, max_tokens=99, stop="label", logprobs=True
    )
    (choice,) = reply.choices
    assert (choice.finish_reason, (choice.message.content or "").strip()) == ("stop", '{"')
    assert choice.logprobs is not None
    assert choice.logprobs.content


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[0-9]{3}/[a-c]{2}z"}}, r"[0-9]{3}/[a-c]{2}z"),
        ({"structured_outputs": {"choice": ["yes", 'a "no"']}}, '(yes|a "no")'),
        ({"structured_outputs": {"grammar": 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{1,4}/'}}, "<[0-9]{1,4}>"),
        # No numbers here: JSON has many ways to write one (5, 5.0, 5e0), and every one of them fits.
        ({"structured_outputs": {"json": {"enum": ["red", None]}}}, '("red"|null)'),
        ({"structured_outputs": {"json": '{"const": "five"}'}}, '"five"'),
        ({"guided_regex": "^(ab){2}$"}, "abab"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'start: "go"'}, "go"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
    ],
)
def test_other_names_for_it(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=fields, max_tokens=300)
    assert re.fullmatch(pattern, reply.choices[0].message.content or "", re.DOTALL)
    completion = client.completions.create(model=MODEL, prompt="21", extra_body=fields, max_tokens=300)
    assert re.fullmatch(pattern, completion.choices[0].text, re.DOTALL)


def test_a_schema_that_cannot_be_held_names_the_keyword(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=wanted)
    assert "'uniqueItems'" in refused.value.message
    assert refused.value.param == "response_format.json_schema.schema"


def test_a_batch_holds_every_line_to_its_own_form(embedded: RunningServer) -> None:
    bodies: list[dict[str, Any]] = [
        {"response_format": FORMAT, "max_tokens": 300},
        {"guided_choice": ["left", "right"]},
        {"guided_json": {"not": {}}},
        {"response_format": FORMAT, "max_tokens": 300, "temperature": 1, "seed": 3},
    ]
    batch_id = submit_batch(embedded, [{"model": MODEL, "messages": QUESTION, **body} for body in bodies])
    batch = wait_terminal(embedded, batch_id)
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    replies = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in result_lines(embedded, batch)
        if line["response"]["status_code"] == 200
    }
    for custom_id in ("c0", "c3"):
        Point.model_validate_json(replies[custom_id])
    assert replies["c1"] in ("left", "right")
