"""``oneOf`` is held where its alternatives exclude each other, however deep the reason lies, and refused where not."""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.models.grammars import GrammarError
from neaptide.server.structured.alternatives import MAX_ALTERNATIVES
from tests.server.structured.test_schemas import is_valid


def tagged(tag: Any, **more: Any) -> dict[str, Any]:
    properties = {"kind": {"const": tag}, **more}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


DEFS = {
    "cat": tagged("cat", kids={"type": "array", "items": {"$ref": "#/$defs/bird"}}),
    "dog": tagged("dog"),
    "bird": {"oneOf": [tagged("owl"), tagged("jay")]},
    "names": {"type": "array", "items": {"type": "string"}},
    "animal": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"$ref": "#/$defs/bird"}]},
}
NULL = {"type": "null"}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (ref("animal"), ['{"kind": "cat", "kids": [{"kind": "owl"}]}', '{"kind": "dog"}'], ['{"kind": "elk"}', "null"]),
        ({"anyOf": [ref("animal"), NULL]}, ['{"kind": "jay"}', "null"], ['{"kind": "cat"}']),
        ({"oneOf": [ref("names"), NULL]}, ['["a"]', "null"], ["[1]"]),
        ({"oneOf": [ref("names"), ref("dog")]}, ['["a"]', '{"kind": "dog"}'], ['["a", 1]']),
        ({"oneOf": [tagged(1), tagged(2), tagged(True)]}, ['{"kind": 1}', '{"kind": true}'], ['{"kind": 3}']),
        ({"oneOf": [{"const": 1, "title": "one"}, {"const": 2}, {"const": "x"}]}, ["1", "2", '"x"'], ["3"]),
        ({"oneOf": [{"type": "integer"}, {"const": 0.5}]}, ["7", "0.5"], ["0.25"]),
        (
            {"type": "object", "required": ["k"], "oneOf": [{"properties": {"k": {"const": c}}} for c in (1, 2)]},
            ['{"k": 1}'],
            ['{"k": 3}', "{}"],
        ),
        (
            {"anyOf": [{"maxLength": 1}, NULL], "oneOf": [{"type": "string"}, ref("names")]},
            ['"a"', '["ab"]'],
            ['"ab"', "null"],
        ),
        (
            {"oneOf": [tagged("a", b=ref("cat")), tagged("a", b=ref("dog"))]},
            ['{"kind": "a", "b": {"kind": "dog"}}'],
            [],
        ),
    ],
)
def test_alternatives_that_exclude_each_other_are_held(schema: Any, good: list[str], bad: list[str]) -> None:
    schema = {"$defs": DEFS} | schema
    validator = jsonschema_rs.validator_for(schema)
    for document, expected in [(document, True) for document in good] + [(document, False) for document in bad]:
        assert validator.is_valid(json.loads(document)) is expected
        assert is_valid(schema, document) is expected, document


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"oneOf": [{"properties": {"a": {}}, "required": ["a"]}, NULL]},
        {"oneOf": [ref("bird"), tagged("jay")]},
        {"oneOf": [ref("none"), NULL]},
        {"$id": "http://example.com/", "oneOf": [ref("names"), {"$ref": "#/$defs/cat"}]},
        {"oneOf": [{"const": index} for index in range(MAX_ALTERNATIVES + 1)]},
        {"prefixItems": [{"$ref": "#/items/oneOf/0"}], "items": {"oneOf": [ref("names"), ref("dog")]}},
        {"oneOf": [NULL, {"type": "array", "items": {"$ref": "#"}}, ref("dog")]},
        {"$defs": {"a": {"oneOf": [ref("a"), ref("a")]}}, **ref("a")},
    ],
)
def test_those_that_are_not_seen_to_are_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        is_valid({"$defs": DEFS} | schema, "null")


ALTERNATIVES: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": ["number", "null"]},
    {"type": "string", "maxLength": 1},
    {"enum": [1, "a", None]},
    {"const": 2},
    {"const": True},
    {"type": "array", "items": {"type": "integer"}},
    {"anyOf": [{"const": "b"}, {"type": "boolean"}]},
    {"allOf": [{"type": ["string", "object"]}, {"enum": ["b", {"a": 1}]}]},
    {"type": "object", "properties": {"a": {"const": 1}}},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"enum": [2, 3]}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
]
DOCUMENTS = ["1", "2", "0.5", "null", "true", '"a"', '"b"', "[]", "[1]", "{}", '{"a": 1}', '{"a": 2}', '{"a": "x"}']


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ALTERNATIVES), min_size=1, max_size=3))
def test_what_is_held_is_what_others_take_it_for(options: list[Any]) -> None:
    schema = {"oneOf": options}
    validator = jsonschema_rs.validator_for(schema)
    for document in DOCUMENTS:
        try:
            accepted = is_valid(schema, document)
        except GrammarError:
            return
        assert accepted is validator.is_valid(json.loads(document)), document


def test_unions_that_lie_in_each_other_are_given_up_in_time() -> None:
    names = [f"#/$defs/{level}" for level in range(1, 14)]
    defs: dict[str, Any] = {str(level): {"anyOf": [{"$ref": name}] * 3} for level, name in enumerate(names)}
    defs |= {"13": {"properties": {"a": NULL}}}
    with pytest.raises(GrammarError):
        is_valid({"$defs": defs, "oneOf": [ref("0"), ref("0")]}, "null")
