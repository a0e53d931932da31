"""Schemas made ready, and complaints in words that name a keyword and quote nothing."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from neaptide.launch.serve import embedded_model_path
from neaptide.models.grammars import GrammarError, Grammars
from neaptide.server.structured.call_formats import HERMES, LLAMA, MISTRAL, CallFormat
from neaptide.server.structured.grammars import Calls, OfferedTool, answer_grammar, calls_grammar, schema_part
from neaptide.server.structured.schemas import MAX_DEPTH, MAX_GRAMMAR_CHARS, SchemaError, explain, prepare_schema


@cache
def grammars() -> Grammars:
    return Grammars(Path(embedded_model_path()), 400, [5])


def accepts(grammar: str, text: str) -> bool:
    matcher = grammars().start(grammar)
    tokens = grammars().tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def is_valid(schema: Any, text: str) -> bool:
    return accepts(answer_grammar(schema_part(schema)), text)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-04-30"], ["2023-02-29", "2100-02-29", "2023-04-31", "2023-13-01"]),
        ("time", ["23:59:59Z", "01:02:03.5+01:30"], ["24:00:00Z", "12:00:60Z", "12:00:00"]),
        ("date-time", ["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"]),
        ("hostname", ["a.b-c.example", "x1", "a-b"], ["-a", "a-", "xn--x", "a..b", "a" * 64]),
    ],
)
def test_formats_are_held_exactly(form: str, good: list[str], bad: list[str]) -> None:
    for text, expected in [(text, True) for text in good] + [(text, False) for text in bad]:
        assert is_valid({"type": "string", "format": form}, json.dumps(text)) is expected, text


def test_a_format_is_held_beside_other_conditions_and_only_where_it_is_one() -> None:
    schema = {"properties": {"format": {"type": "string", "format": "date", "allOf": [{"pattern": "^2"}]}}}
    assert is_valid(schema, '{"format": "2024-02-29"}')
    assert not is_valid(schema, '{"format": "1999-01-01"}')
    assert not is_valid(schema, '{"format": "2023-02-29"}')
    assert is_valid({"const": {"format": "date"}}, '{"format": "date"}')


def test_a_caller_cannot_loosen_the_compiler() -> None:
    schema = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        grammars().start(answer_grammar(schema_part(schema)))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf"),
        ({"type": "string", "format": "semver"}, "format"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"$ref": "http://example.com/schema"}, "$ref"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, "patternProperties"),
    ],
)
def test_a_complaint_names_the_keyword_and_quotes_nothing(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(GrammarError) as refused:
        grammars().start(answer_grammar(schema_part(schema)))
    assert explain(str(refused.value)) == (
        f"The schema cannot be enforced: keyword '{keyword}' is not supported as it is used."
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"contentEncoding": "base64"},
        {"allOf": [{"$id": "http://a/", "$ref": "b"}]},
        {"enum": ["x" * MAX_GRAMMAR_CHARS]},
        False,
        [],
        json.loads('{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1)),
    ],
)
def test_what_the_compiler_would_pass_over_or_choke_on_never_reaches_it(schema: Any) -> None:
    with pytest.raises(SchemaError):
        prepare_schema(schema)


# ---- calls in the formats of families ------------------------------------------------------------------------------

ARGUMENTS = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"], "additionalProperties": False}
WRITTEN: dict[CallFormat, tuple[str, str]] = {
    HERMES: (
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    ),
    MISTRAL: (
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
    ),
    LLAMA: (
        '{"name": "f", "parameters": {"x": 1}}',
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
    ),
}


def calls(form: CallFormat, *, forced: bool = True, several: bool = True) -> Calls:
    tools = [OfferedTool("f", ARGUMENTS, strict=True), OfferedTool("g", None, strict=False)]
    return Calls(tools, form, None, forced, several)


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
def test_forced_calls_are_calls_and_nothing_else(form: CallFormat) -> None:
    one, two = WRITTEN[form]
    many, single = calls_grammar(calls(form), None), calls_grammar(calls(form, several=False), None)
    assert [accepts(many, text) for text in (one, two, "", "text", "text " + one, one + " text")] == [True] * 2 + [
        False
    ] * 4
    assert [accepts(single, text) for text in (one, two)] == [True, False]
    assert not accepts(many, one.replace('"x": 1', '"x": 2'))


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
def test_strict_calls_stand_beside_free_text(form: CallFormat) -> None:
    one, two = WRITTEN[form]
    grammar = calls_grammar(calls(form, forced=False), None)
    assert all(accepts(grammar, text) for text in ("", "Hello, {you}!", one, two))
    assert not accepts(grammar, one.replace('"x": 1', '"x": 2'))
    if form.begin:
        assert accepts(grammar, "Let me see. " + one)


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
def test_beside_a_format_there_is_no_free_text(form: CallFormat) -> None:
    grammar = calls_grammar(calls(form, forced=False), schema_part({"type": "boolean"}))
    assert [accepts(grammar, text) for text in ("true", WRITTEN[form][0], "Hello")] == [True, True, False]


def test_a_begin_that_is_a_special_token_is_that_token() -> None:
    token_id = 2
    marked = Calls([OfferedTool("g", None, strict=True)], MISTRAL, token_id, forced=True, several=False)
    matcher = grammars().start(calls_grammar(marked, None))
    rest = grammars().tokenizer.tokenize_str('[{"name": "g", "arguments": {}}]')
    assert matcher.consume_tokens([token_id, *rest])
    assert matcher.is_accepting()
