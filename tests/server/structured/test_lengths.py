"""How long documents can get: exact cases, and that no document of a schema gets past its bound."""

import json
import random
from typing import Any

import numpy as np
import pytest

from neaptide.launch.serve import embedded_model_path
from neaptide.models.grammars import Grammars
from neaptide.server.openai.endpoints import CHAT
from neaptide.server.openai.prepare import prepare
from neaptide.server.structured.grammars import answer_grammar, schema_part
from neaptide.server.structured.lengths import max_document_bytes
from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.grammars.test_grammars_at_length import random_schema
from tests.server.conftest import USER, make_context

EOS_TOKEN_ID = 5
CLOSED = {"type": "object", "additionalProperties": False}


def chained(levels: int) -> dict[str, Any]:
    """Each level refers to the next one twice."""
    names = [f"#/$defs/{level}" for level in range(1, levels + 1)]
    defs = {str(level): {"anyOf": [{"$ref": name}] * 2} for level, name in enumerate(names)}
    return {"$defs": defs | {str(levels): {"type": "boolean"}}, "$ref": "#/$defs/0"}


CYCLE = {"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "boolean"}, 5),
        ({"const": None}, 5),
        ({"enum": ["ab", 7]}, 26),
        ({"type": "string", "maxLength": 3}, 38),
        ({"type": "string", "maxLength": 50, "format": "uuid"}, 434),
        ({"type": "integer", "minimum": -5, "maximum": 1000}, 8),
        ({"type": "number", "minimum": 0, "maximum": 25, "multipleOf": 0.25}, 9),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False}, 15),
        ({"type": ["null", "boolean"]}, 5),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 3}, 20),
        ({"type": "array", "maxItems": 0}, 2),
        (CLOSED, 2),
        (CLOSED | {"properties": {"a": {"type": "null"}}}, 24),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, 5),
        ({"type": "string", "allOf": [{"const": "a"}]}, 14),
        ({"$defs": {"a": {"type": "boolean"}}, "$ref": "#/$defs/a"}, 5),
        (chained(30), 5),
        (False, 0),
    ],
)
def test_bounds(schema: Any, expected: int) -> None:
    assert max_document_bytes(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "string"},
        {"type": "string", "pattern": "^a$"},
        {"maxLength": 3},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 1e-9},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "null"}},
        {"type": "array", "maxItems": 2},
        {"type": "array", "maxItems": 2, "items": {"type": "null"}, "prefixItems": [{"type": "string"}]},
        {"type": "object", "properties": {"a": {"type": "null"}}},
        CLOSED | {"properties": {"a": {}}},
        CLOSED | {"patternProperties": {"^a": {"type": "null"}}},
        {"anyOf": [{"type": "null"}, {"type": "string"}]},
        {"type": ["null", "string"]},
        CYCLE,
        {"$ref": "#/$defs/none"},
        {"$ref": "other.json"},
        {"$id": "x", "$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"},
    ],
)
def test_what_has_no_bound(schema: Any) -> None:
    assert max_document_bytes(schema) is None


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    config = json.loads((embedded_model_path() / "config.json").read_text())
    return Grammars(embedded_model_path(), config["vocab_size"], [EOS_TOKEN_ID])


def a_long_walk(grammars: Grammars, schema: Any, rng: random.Random) -> int:
    """Tokens of a document that ends only where it must; 1,000 at most."""
    matcher = grammars.compile(answer_grammar(schema_part(schema)))
    for count in range(1000):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()) - {EOS_TOKEN_ID}
        if not allowed:
            return count
        assert matcher.consume_token(rng.choice(sorted(allowed)))
    return 1000


def test_no_document_is_longer_than_its_bound(grammars: Grammars) -> None:
    rng = random.Random(11)
    num_bounded = 0
    while num_bounded < 40:
        schema = random_schema(rng)
        bound = max_document_bytes(schema_part(schema)["json_schema"])
        if bound is not None:
            num_bounded += 1
            assert a_long_walk(grammars, schema, rng) <= bound, schema


def test_an_output_is_given_no_more_room_than_it_can_need(tokenizer: Tokenizer) -> None:
    context = make_context(tokenizer)

    def limit(**fields: Any) -> int:
        (found,) = prepare(CHAT, {"messages": USER, **fields}, context).max_tokens
        return found

    assert limit(guided_choice=["left", "größer"]) == 9
    assert limit(guided_json={"type": "boolean"}) == 6
    assert limit(guided_json={"type": "boolean"}, max_tokens=2) == 2
    assert limit(guided_json={"type": "string"}) == limit(guided_regex="a") == limit()
    # What it may ask for is looked at after that.
    assert limit(guided_json={"type": "boolean"}, max_tokens=8192, n=9) == 6


def test_a_call_that_is_forced_alone_is_given_no_more_room_than_it_can_need(tokenizer: Tokenizer) -> None:
    context = make_context(tokenizer)
    city = {"properties": {"city": {"enum": ["paris", "rom"]}}, "required": ["city"], "additionalProperties": False}

    def limit(*parameters: dict[str, Any], **fields: Any) -> int:
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": one}} for i, one in enumerate(parameters)
        ]
        body = {"messages": USER, "tools": tools, "max_tokens": 1000, **fields}
        (found,) = prepare(CHAT, body, context).max_tokens
        return found

    around = '<tool_call>\n{"name": "f0", "arguments": }\n</tool_call>'
    longest_arguments = max_document_bytes({"type": "object", **city})
    assert longest_arguments is not None
    longest = len(around) + longest_arguments
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    assert limit(city, **required) == longest + 1
    assert limit({}, city, **required) == longest + 1
    assert limit(city, tool_choice={"type": "function", "function": {"name": "f0"}}) == longest + 1
    assert longest_arguments >= len('{"city": "paris"}')
    # Several calls, open arguments, and text in place of a call have no bound.
    assert limit(city, tool_choice="required") == 1000
    assert limit({"properties": {"city": {"type": "string"}}}, **required) == 1000
    assert limit(city, parallel_tool_calls=False) == 1000
