"""Names of properties that a schema leaves open: one spelling, and none counted twice."""

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from neaptide.server.structured.grammars import answer_grammar, schema_part
from neaptide.server.structured.schemas import SchemaError, prepare_schema
from tests.executors.grammars.test_grammars_at_length import random_schema
from tests.server.structured.test_schemas import CLOSED, grammars, is_valid


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1, "b": "x"}', '{"b": "\\n"}'], ['{"\\u0061": "x"}']),
        ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ['{"a": 1, "\\u0061": "x"}', '{"\\u0041": 1}']),
        ({"patternProperties": {"^a": {"type": "null"}}}, ['{"ab": null, "b": 1}'], ['{"\\u0061b": 1}']),
        ({"properties": {"\n": {"const": 1}}}, ['{"\\n": 1, "b": 2}'], ['{"\\n": 2}', '{"\\u000a": 2}']),
        (
            {"items": {"anyOf": [{"type": "null"}, {"properties": {"a": {"const": 1}}, "required": ["a"]}]}},
            ['[{"a": 1, "b": 2}]'],
            ['[{"a": 1, "\\u0061": 2}]'],
        ),
        ({"$defs": {"x": {"properties": {"a": {"const": 1}}}}, "$ref": "#/$defs/x"}, ['{"b": 2}'], ['{"\\u0061": 2}']),
        ({"required": ["a"], "minProperties": 2}, ['{"a": 1, "b": 2}'], ['{"a": 1, "\\u0061": 2}', '{"a": 1, "a": 2}']),
        (
            {"patternProperties": {"[A-Za-z0-9-_.:]{1,255}": {"type": "string"}}},
            ['{"child.1": "x"}', '{"%": 1}'],
            ['{"child.1": 1}'],
        ),
        (CLOSED | {"properties": {"a": {"type": "string"}}}, ['{"a": "\\u0001"}'], ['{"\\u0061": "x"}']),
        ({"enum": ["\x00"]}, ['"\\u0000"'], ['"\\u0001"']),
    ],
)
def test_a_property_has_one_spelling(schema: Any, good: list[str], bad: list[str]) -> None:
    for texts, expected in ((good, True), (bad, False)):
        for text in texts:
            assert is_valid(schema, text) is expected, text
            json.loads(text)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"const": "\x00"}}}, "const"),
        ({"properties": {"a": {"enum": [1, {"b": ["\x1f"]}]}}}, "enum"),
        ({"properties": {"a\x0b": {}}}, "properties"),
        ({"properties": {"a": {}}, "required": ["\x01"]}, "required"),
    ],
)
def test_what_that_spelling_has_no_word_for_is_refused(schema: Any, keyword: str) -> None:
    with pytest.raises(SchemaError, match=f"'{keyword}'"):
        prepare_schema(schema)


ONE_OR_TWO = {"a": {"type": "integer"}, "b": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"minProperties": 1}, False),
        ({"minProperties": 2}, True),
        ({"minProperties": 2.0, "additionalProperties": {"type": "null"}}, True),
        ({"minProperties": 2, "required": ["a"]}, False),
        ({"minProperties": 3, "required": ["a", "a"]}, True),
        ({"minProperties": 2, "required": [["a"]]}, True),
        (CLOSED | {"minProperties": 2, "properties": ONE_OR_TWO, "required": ["a", "b"]}, False),
        (CLOSED | {"minProperties": 2, "patternProperties": {"^a": {}}}, True),
        ({"maxProperties": 2}, False),
    ],
)
def test_names_that_may_repeat_are_not_counted(schema: Any, is_refused: bool) -> None:
    """``{"a": 1, "a": 2}`` has one property, and the compiler sees two."""
    if is_refused:
        with pytest.raises(SchemaError, match="'minProperties'"):
            prepare_schema(schema)
    else:
        grammars().compile(answer_grammar(schema_part(schema)))


# ---- documents in other notations ----------------------------------------------------------------------------


def opened(schema: Any) -> Any:
    """Its objects have properties of any other name."""
    if isinstance(schema, list):
        return [opened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: opened(part) for key, part in schema.items() if key != "additionalProperties"}


class Writer:
    """Writes documents with names of the schema and values of any kind, some names escaped or repeated."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def document(self, schema: Any) -> str:
        rng = self._rng
        if "anyOf" in schema:
            return self.document(rng.choice(schema["anyOf"]))
        if schema.get("type") == "array":
            return "[" + ", ".join(self.document(schema["items"]) for _ in range(rng.randint(0, 3))) + "]"
        if schema.get("type") != "object":
            return rng.choice(["1", "0.25", '"ab"', '"a"', "null", "true", '{"k": []}', '"2024-02-29"', '"xyz"'])
        members = []
        for name, part in schema["properties"].items():
            members += [f"{self._spelled(name)}: {self.document(part)}"] * rng.choice([0, 1, 1, 1])
            members += [f"{self._spelled(name)}: 1"] * rng.choice([0, 0, 0, 1])
        members += ['"other": null', '"other": 1'][: rng.choice([0, 0, 1, 2])]
        return "{" + ", ".join(members) + "}"

    def _spelled(self, name: str) -> str:
        is_escaped = self._rng.random() < 0.2
        return f'"\\u{ord(name[0]):04x}{name[1:]}"' if is_escaped else json.dumps(name, ensure_ascii=False)


def test_what_is_accepted_is_valid_however_names_are_written() -> None:
    rng = random.Random(21)
    writer = Writer(rng)
    num_accepted = num_objects = 0
    for _ in range(150):
        schema = opened(random_schema(rng))
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        for _ in range(20):
            text = writer.document(schema)
            if is_valid(schema, text):
                num_accepted += 1
                num_objects += text.startswith("{") and len(text) > 2
                assert validator.is_valid(json.loads(text)), (schema, text)
    assert num_accepted > 400
    assert num_objects > 40
