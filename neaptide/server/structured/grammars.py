"""Translates constraints to the compiler's language: JSON, expressions, choices, tool calls.

Schemas remain schemas, under a name that the rules refer to. Callers' text becomes part of rules only as quoted
strings, except for regular expressions and whole grammars.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neaptide.server.openai.schemas import MAX_LISTED_CHOICES
from neaptide.server.structured.call_formats import CallFormat
from neaptide.server.structured.lengths import max_document_bytes
from neaptide.server.structured.schemas import (
    MAX_GRAMMAR_CHARS,
    MAX_WRITTEN_CHARS,
    TOO_COMPLEX,
    SchemaError,
    prepare_schema,
)

_TEXT = "TEXT: /(.|\\n)*/\n"
_TEXT_WITHOUT_CALLS = "TEXT: /([^{ \\t\\r\\n](.|\\n)*)?/\n"
"""Text for formats in which only its first character distinguishes it from a call."""

Part = Mapping[str, Any]
"""An entry of the compiler's list of grammars, without its name."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool
    """Whether its arguments follow the schema even in a call that is not forced."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that an output may contain."""

    tools: Sequence[OfferedTool]
    form: CallFormat
    begin_token_id: int | None
    end_token_id: int | None
    """Token ids of ``form.begin`` and ``form.end``, if these are single tokens, which a text grammar cannot match."""
    forced: bool
    """Whether the output is at least one call, and nothing else."""
    several: bool


def schema_part(schema: Any) -> Part:
    """Constraint to a JSON schema. Raises SchemaError."""
    return {"json_schema": prepare_schema(schema)}


def regex_part(expression: str) -> Part:
    """Constraint to a regular expression. The whole output must match, so anchors at its ends are dropped. Raises
    SchemaError."""
    _check_length(expression, "regular expression")
    body = expression.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    escaped, is_escaped = [], False
    for character in body:
        escaped.append("\\/" if character == "/" and not is_escaped else "\\n" if character == "\n" else character)
        is_escaped = character == "\\" and not is_escaped
    return {"lark_grammar": f"start: /{''.join(escaped)}/"}


def choice_part(choices: Sequence[str]) -> Part:
    """Constraint to one of several texts. Raises SchemaError."""
    if not 0 < len(choices) <= MAX_LISTED_CHOICES:
        raise SchemaError(f"There must be 1 to {MAX_LISTED_CHOICES} choices.")
    rule = " | ".join(map(json.dumps, choices))
    _check_length(rule, "list of choices")
    return {"lark_grammar": f"start: {rule}"}


def lark_part(grammar: str) -> Part:
    """Constraint to a Lark grammar. Raises SchemaError."""
    _check_length(grammar, "grammar")
    if "::=" in grammar:
        raise SchemaError("The grammar must be in the notation of Lark: rules are written 'name: ...'.")
    return {"lark_grammar": grammar}


def _check_length(text: str, what: str) -> None:
    if not text.strip():
        raise SchemaError(f"The {what} is empty.")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise SchemaError(f"The {what} has more than {MAX_GRAMMAR_CHARS} characters.")


def answer_grammar(answer: Part) -> str:
    """Grammar of an output that is the answer."""
    return _of_parts({"answer": answer})


def calls_grammar(calls: Calls, answer: Part | None) -> str:
    """Grammar of an output with calls or the answer, which is free text if None.

    Raises:
        SchemaError: the parameters of a function are invalid.
    """
    form = calls.form
    parts: dict[str, Part] = {}
    options = []
    num_chars = 0
    for index, tool in enumerate(calls.tools):
        is_held = calls.forced or tool.strict
        part = parts[f"arguments_{index}"] = schema_part(_parameters(tool) if is_held else {"type": "object"})
        num_chars += len(json.dumps(part, ensure_ascii=False))
        if num_chars > MAX_WRITTEN_CHARS:
            raise SchemaError(TOO_COMPLEX)
        head = _head(tool, form)
        options.append(f'{json.dumps(head)} @arguments_{index} "}}"')
    rules = [f"call: {' | '.join(options)}\n"]
    if answer is not None:
        parts["answer"] = answer
    rules += _forced(calls) if calls.forced or answer is not None else _beside_text(calls)
    start = "start: calls\n" if calls.forced else "start: calls | @answer\n" if answer is not None else ""
    return _of_parts({"main": {"lark_grammar": start + "".join(rules)}, **parts})


def after_reasoning(
    grammar: str, begins: Sequence[tuple[str, int | None]], ends: Sequence[tuple[str, int | None]]
) -> str:
    """Grammar of an output that thinks before what ``grammar`` describes.

    Args:
        begins: marks that begin reasoning, which is then optional; empty if the prompt has begun it. Each has its
            token id if it is a single added token.
        ends: marks that end it.
    """
    parts = json.loads(grammar)["grammars"]
    thought = "thoughts BLANK?"
    if begins:
        thought = f"(({' | '.join(_mark(*begin) for begin in begins)}) {thought})?"
    tokens = [f"THOUGHT <[{token_id}]>" for _, token_id in ends if token_id is not None]
    spelled = [f"spelled_{index}" for index in range(len(ends))]
    rules = [f"start: {thought} @{parts[0]['name']}\n", f"thoughts: {' | '.join([*tokens, *spelled])}\n"]
    # Lazy: reasoning ends at the first mark, also where it is spelled out although it is a token.
    rules += [f"spelled_{index}[lazy]: THOUGHT {json.dumps(mark)}\n" for index, (mark, _) in enumerate(ends)]
    rules += ["THOUGHT: /(.|\\n)*/\n", "BLANK: /[ \\t\\r\\n]{1,4}/\n"]
    return json.dumps({"grammars": [{"name": "thinking", "lark_grammar": "".join(rules)}, *parts]}, ensure_ascii=False)


def max_calls_bytes(calls: Calls) -> int | None:
    """Largest size of an output of calls alone, in bytes; None if there is no known bound."""
    if calls.several:
        return None
    form = calls.form
    longest = 0
    for tool in calls.tools:
        arguments_bytes = max_document_bytes(_parameters(tool))
        if arguments_bytes is None:
            return None
        longest = max(longest, len(_head(tool, form).encode()) + arguments_bytes + len("}"))
    brackets = len("[]") if form.is_list else 0
    return len((form.begin + 2 * form.padding + form.end).encode()) + brackets + longest


def _head(tool: OfferedTool, form: CallFormat) -> str:
    """A call's text up to its arguments."""
    return json.dumps({"name": tool.name}, ensure_ascii=False)[:-1] + f', "{form.arguments_key}": '


def _parameters(tool: OfferedTool) -> dict[str, Any]:
    return {"type": "object", **(tool.parameters or {"properties": {}, "additionalProperties": False})}


def _forced(calls: Calls) -> list[str]:
    """The rule ``calls``: nothing but calls."""
    form = calls.form
    section = _section("section", _mark(form.begin, calls.begin_token_id), calls)
    return [_repeated(form, calls.several), section]


def _repeated(form: CallFormat, several: bool) -> str:
    more = f" ({json.dumps(form.separator)} section)*" if several and not form.is_list else ""
    return f"calls: section{more}\n"


def _mark(text: str, token_id: int | None) -> str:
    return f"<[{token_id}]>" if token_id is not None else json.dumps(text) if text else ""


def _section(rule: str, begin: str, calls: Calls) -> str:
    """One call, or the list of calls, between its marks."""
    form = calls.form
    padding = json.dumps(form.padding) if form.padding else ""
    end = _mark(form.end, calls.end_token_id)
    return f"{rule}: {begin} {padding} {_body(form, calls.several)} {padding} {end}\n"


def _body(form: CallFormat, several: bool) -> str:
    if not form.is_list:
        return "call"
    more = f"({json.dumps(form.separator)} call)* " if several else ""
    return f'"[" call {more}"]"'


def _beside_text(calls: Calls) -> list[str]:
    """The rule ``start``: text, then calls."""
    form = calls.form
    if not form.begin:
        return ["start: TEXT | calls\n", *_forced(calls), _TEXT_WITHOUT_CALLS]
    # Lazy: text ends where a call can begin, even if the mark is spelled out although it is a token.
    begin = "begin" if calls.begin_token_id is None else f"(begin | TEXT <[{calls.begin_token_id}]>)"
    start = "start: section* TEXT\n" if calls.several and form.end else "start: section | TEXT\n"
    spelled = f"begin[lazy]: TEXT {json.dumps(form.begin)}\n"
    return [start, spelled, _section("section", begin, calls), _TEXT]


def _of_parts(parts: Mapping[str, Part]) -> str:
    named = [{"name": name, **part} for name, part in parts.items()]
    return json.dumps({"grammars": named}, ensure_ascii=False)
