"""What a wrong body costs: the errors that are made of it are counted, for pydantic makes them all in one call, while
no other thread runs."""

import json
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from neaptide.server.http.jsonbody import MAX_STRUCTURE, parse_object
from neaptide.server.openai.openapi import BODIES

MANY = MAX_STRUCTURE // 26
"""Entries of one list or object that the parser lets pass, whatever they are."""
WRONG: tuple[object, ...] = ([], {}, 1.5)
"""One of them is wrong wherever anything is."""
LISTS = [[wrong] * MANY for wrong in WRONG]
OBJECTS = [dict.fromkeys(map(str, range(MANY)), wrong) for wrong in WRONG]
MAX_ERRORS = 16


def spoilt(annotation: Any) -> Iterator[tuple[str, Any]]:
    """Values of a field in which one list or object has many wrong entries, and where in the field that is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from spoilt(arguments[0])
    elif origin in (Union, UnionType):
        for one in arguments:
            yield from spoilt(one)
    elif origin is list:
        for wrong, entries in zip(WRONG, LISTS, strict=True):
            yield f"[{wrong}]", entries
        for where, value in spoilt(arguments[0]):
            yield f"[]{where}", [value]
    elif origin is dict:
        for wrong, members in zip(WRONG, OBJECTS, strict=True):
            yield f"{{{wrong}}}", members
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            for where, value in spoilt(field.annotation):
                yield f".{name}{where}", {field.alias or name: value}


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_a_wrong_list_or_object_is_a_few_errors_however_long_it_is(model: type[BaseModel]) -> None:
    found = {}
    for where, body in spoilt(model):
        try:
            model.model_validate(body)
        except ValidationError as error:
            found[where] = error.error_count()
    assert {where: count for where, count in found.items() if count > MAX_ERRORS} == {}


def test_the_places_that_are_looked_at() -> None:
    places = {where for model in BODIES for where, _ in spoilt(model)}
    assert {
        ".guided_choice[1.5]",
        ".structured_outputs.choice[1.5]",
        ".messages[1.5]",
        ".messages[].content[[]]",
        ".messages[].tool_calls[{}]",
        ".input[].output[1.5]",
        ".tools[{}]",
        ".prompt[][1.5]",
        ".logit_bias{[]}",
        ".metadata{1.5}",
        ".chat_template_kwargs{[]}",
    } <= places
    parse_object(json.dumps({"logit_bias": OBJECTS[0]}).encode())  # the heaviest passes


def test_a_large_object_is_named_with_its_bound() -> None:
    chat = BODIES[0]
    body = {"messages": [{"role": "user", "content": "x"}], "logit_bias": {str(i): 1 for i in range(1025)}}
    with pytest.raises(ValidationError) as found:
        chat.model_validate(body)
    (error,) = found.value.errors()
    assert (error["type"], error["loc"]) == ("too_long", ("logit_bias",))
    assert error["msg"].startswith("Dictionary should have at most 1024 items")
    body["logit_bias"].pop("0")  # type: ignore[attr-defined]
    chat.model_validate(body)
