"""Schemas made ready, and complaints in words that name a keyword and quote nothing."""

import ipaddress
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neaptide.launch.serve import embedded_model_path
from neaptide.models.grammars import GrammarError, Grammars
from neaptide.server.structured.call_formats import HERMES, LLAMA, MISTRAL, CallFormat
from neaptide.server.structured.formats import WRITTEN_OUT
from neaptide.server.structured.grammars import Calls, OfferedTool, answer_grammar, calls_grammar, schema_part
from neaptide.server.structured.notations import MAX_SAFE
from neaptide.server.structured.schemas import MAX_DEPTH, MAX_GRAMMAR_CHARS, SchemaError, explain, prepare_schema
from neaptide.server.text.tokenizer import Tokenizer


@cache
def grammars() -> Grammars:
    return Grammars(Path(embedded_model_path()), 416, [5])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(embedded_model_path())


def accepts(grammar: str, text: str) -> bool:
    return accepts_tokens(grammar, grammars().tokenizer.tokenize_str(text))


def accepts_tokens(grammar: str, tokens: list[int]) -> bool:
    matcher = grammars().compile(grammar)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CLOSED = {"type": "object", "additionalProperties": False}


def is_valid(schema: Any, text: str) -> bool:
    return accepts(answer_grammar(schema_part(schema)), text)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", ["0001-01-01", "1000-01-01", "0400-02-29"], ["0000-01-01", "0000-02-29", "0100-02-29"]),
        ("date", ["2024-02-29", "2000-02-29", "2023-04-30"], ["2023-02-29", "2100-02-29", "2023-04-31", "2023-13-01"]),
        ("time", ["23:59:59Z", "01:02:03.5+01:30"], ["24:00:00Z", "12:00:60Z", "12:00:00", "22:59:60Z", "23:59:61Z"]),
        ("time", ["23:59:60Z", "23:59:60.25-00:00"], ["23:59:60+01:00", "23:59:60"]),
        ("date-time", ["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"]),
        (
            "date-time",
            ["1998-12-31T23:59:60Z", "2015-06-30t23:59:60z"],
            ["1998-12-30T23:59:60Z", "0000-12-31T23:59:60Z"],
        ),
        (
            "ipv6",
            ["::", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4", "FE80::1"],
            ["1::2::3", "::1.2.3", "::256.0.0.1", "::g"],
        ),
        (
            "email",
            ["a.b+c@x-y.example", '"a b"@x', '"a\\"@"@x', "a@[127.0.0.1]", "a@[IPv6:::1]"],
            ["a", "@x", "a@", ".a@x", "a..b@x", "a b@x", "a@x=y", "a@[127.0.0.300]", "a@-x", '"a"b"@x', "a@x, b@x"],
        ),
        (
            "email",
            ["a" * 64 + "@x", "a" * 31 + "." + "b" * 32 + "@x", "a." * 31 + "a@x", f'"{"a" * 62}"@x'],
            ["a" * 65 + "@x", "a" * 32 + "." + "b" * 32 + "@x", f'"{"a" * 63}"@x', "a@" + ".".join(["b" * 63] * 4)],
        ),
        ("json-pointer", ["", "/a~0/~1b//"], ["a", "/~", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "20#"], ["/a", "01", "1#/a", "-1"]),
        ("ipvanyaddress", ["1.2.3.4", "::1"], ["1.2.3", "x"]),
        ("byte", ["", "QQ==", "QUI=", "QUJD", "+/+/"], ["QQ", "QR==", "QUJ=", "Q===", "-_-_"]),
        ("base64url", ["-_-_", "QQ=="], ["+/+/"]),
        ("uuid4", ["9F3b1c00-0000-4000-8000-00000000000a"], ["9f3b1c00-0000-1000-8000-00000000000a", "x"]),
        ("password", ["", "any"], []),
        ("hostname", ["a.b-c.example", "x1", "a-b"], ["-a", "a-", "xn--x", "a..b", "a" * 64]),
    ],
)
def test_formats_are_held_exactly(form: str, good: list[str], bad: list[str]) -> None:
    for text, expected in [(text, True) for text in good] + [(text, False) for text in bad]:
        assert is_valid({"type": "string", "format": form}, json.dumps(text)) is expected, text


def test_integers_of_a_width_stay_within_it() -> None:
    schema = {"type": "integer", "format": "int32", "minimum": 0}
    assert [is_valid(schema, text) for text in ("0", "2147483647", "2147483648", "-1")] == [True, True, False, False]
    for text, expected in ((MAX_SAFE, True), (-MAX_SAFE, True), (MAX_SAFE + 1, False), (-MAX_SAFE - 1, False)):
        assert is_valid({"type": "integer", "format": "int64"}, str(text)) is expected
    assert not is_valid({"type": "integer", "format": "uint64"}, "-1")
    assert is_valid({"type": "string", "maxLength": 3, "format": "path"}, '"a/b"')


@given(st.lists(st.sampled_from(["0", "ab12", "12345", ":", "::", ".", "10.0.0.255", "1.2.3.256", "%1"]), max_size=17))
@example(["::", "1:" * 6, "1"])
@example(["1:" * 7, ":"])
@example(["1:" * 6, ":", "1.2.3.4"])
def test_an_ipv6_address_is_what_others_take_for_one(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        is_address = ipaddress.IPv6Address(text).scope_id is None
    except ValueError:
        is_address = False
    assert (re.fullmatch(WRITTEN_OUT["ipv6"]["pattern"], text) is not None) is is_address


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\s$", ["\ufeff", "\u2003", "\n"], ["\x85", "a"]),
        (r"^\S$", ["\x85", "a"], ["\ufeff", " "]),
        (r"^[\s.]$", ["\ufeff", "."], ["a"]),
        (r"^[^\s]$", ["a"], ["\ufeff", "\t"]),
        (r"^.$", ["a", "ü"], ["\n", "\r", "\u2028"]),
        (r"^\.\[.$", [".[x"], ["x[x", ".[\n"]),
    ],
)
def test_expressions_mean_what_ecmascript_makes_of_them(pattern: str, good: list[str], bad: list[str]) -> None:
    for schema, wrap in (({"pattern": pattern}, "{}"), ({"patternProperties": {pattern: {}}} | CLOSED, "{{{}: 1}}")):
        for text, expected in [(text, True) for text in good] + [(text, False) for text in bad]:
            document = wrap.format(json.dumps(text, ensure_ascii=False))
            assert is_valid(schema, document) is expected, (schema, text)


def test_a_format_is_held_beside_other_conditions_and_only_where_it_is_one() -> None:
    schema = {"properties": {"format": {"type": "string", "format": "date", "allOf": [{"pattern": "^2"}]}}}
    assert is_valid(schema, '{"format": "2024-02-29"}')
    assert not is_valid(schema, '{"format": "1999-01-01"}')
    assert not is_valid(schema, '{"format": "2023-02-29"}')
    assert is_valid({"const": {"format": "date"}}, '{"format": "date"}')


def test_a_caller_cannot_loosen_the_compiler() -> None:
    schema = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
    with pytest.raises(GrammarError, match="uniqueItems"):
        grammars().compile(answer_grammar(schema_part(schema)))


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
        grammars().compile(answer_grammar(schema_part(schema)))
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


MANY_ADDRESSES = {"properties": {str(index): {"format": "email"} for index in range(600)}}


def test_what_becomes_too_much_once_it_is_written_out_is_refused() -> None:
    with pytest.raises(SchemaError, match="too complex"):
        prepare_schema(MANY_ADDRESSES)


def test_so_are_tools_that_are_too_much_together() -> None:
    few = {"properties": {str(index): {"format": "email"} for index in range(200)}}
    tools = [OfferedTool(name, few, strict=True) for name in "abc"]
    calls_grammar(Calls(tools[:2], HERMES, None, None, forced=True, several=True), None)
    with pytest.raises(SchemaError, match="too complex"):
        calls_grammar(Calls(tools, HERMES, None, None, forced=True, several=True), None)


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
    return Calls(tools, form, tokenizer().added_id(form.begin), tokenizer().added_id(form.end), forced, several)


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


def spelled(text: str) -> list[int]:
    """Character by character: whatever tokens of their own words have."""
    return [token for character in text for token in tokenizer().encode(character)]


def test_marks_that_are_tokens_are_these_tokens() -> None:
    """As models write them: ``<tool_call>`` is one token of Qwen's, too, though no special one."""
    one, two = WRITTEN[HERMES]
    begin, end = (tokenizer().added_id(mark) for mark in (HERMES.begin, HERMES.end))
    assert begin is not None
    assert [tokenizer().encode(one)[0], tokenizer().encode(one)[-1]] == [begin, end]
    forced = calls_grammar(calls(HERMES), None)
    assert [accepts_tokens(forced, tokenizer().encode(text)) for text in (one, two)] == [True, True]
    assert not accepts_tokens(forced, spelled(one))
    beside = calls_grammar(calls(HERMES, forced=False), None)
    body = one.removeprefix(HERMES.begin).removesuffix(HERMES.end)
    for start in ([begin], spelled(f"I see. {HERMES.begin}")):  # the output's text is read as a call in both cases
        assert accepts_tokens(beside, [*start, *tokenizer().encode(body), end])
        assert not accepts_tokens(beside, [*start, *tokenizer().encode(body.replace("1", "2")), end])


def test_a_begin_that_is_a_special_token_is_that_token() -> None:
    token_id = 2
    marked = Calls([OfferedTool("g", None, strict=True)], MISTRAL, token_id, None, forced=True, several=False)
    matcher = grammars().compile(calls_grammar(marked, None))
    rest = grammars().tokenizer.tokenize_str('[{"name": "g", "arguments": {}}]')
    assert matcher.consume_tokens([token_id, *rest])
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[ab]{2,3}", ["xab", "aaaaa"], ["axb", ""]),
        ("[a\\]]{1,400}", ["]"], ["x"]),
        ("\\d{3,}", ["a1234"], ["12a3"]),
        ("^[ab]{2,3}$", ["aba"], ["abab", "a"]),
        ("x[ab]{2,3}", ["xabab"], ["xa", "ab"]),
        ("a{0,5}", ["", "b"], []),
    ],
)
def test_runs_that_are_found_anywhere_have_a_shortest_length_only(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [is_valid(schema, json.dumps(text)) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
    assert [re.search(pattern, text) is not None for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
