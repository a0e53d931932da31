"""What a caller asks of the output, in the compiler's language: JSON, expressions, choices, calls of tools.

Schemas stay schemas there, under a name that the rules refer to. Text from callers gets into rules as quoted strings
only, but for regular expressions and whole grammars, which are theirs to write.
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
"""Where only its first character tells a call from text."""

Part = Mapping[str, Any]
"""An entry of the compiler's list of grammars, without its name."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool
    """Its arguments follow the schema even in a call that nothing forces."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls an output may hold."""

    tools: Sequence[OfferedTool]
    form: CallFormat
    begin_token_id: int | None
    end_token_id: int | None
    """Of ``form.begin`` and ``form.end``, if these are tokens of their own, which no grammar of text allows."""
    forced: bool
    """At least one, and nothing else."""
    several: bool


def schema_part(schema: Any) -> Part:
    """Raises SchemaError."""
    return {"json_schema": prepare_schema(schema)}


def regex_part(expression: str) -> Part:
    """The whole output matches, so anchors at its ends say nothing. Raises SchemaError."""
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
    """Raises SchemaError."""
    if not 0 < len(choices) <= MAX_LISTED_CHOICES:
        raise SchemaError(f"There must be 1 to {MAX_LISTED_CHOICES} choices.")
    rule = " | ".join(map(json.dumps, choices))
    _check_length(rule, "list of choices")
    return {"lark_grammar": f"start: {rule}"}


def lark_part(grammar: str) -> Part:
    """Raises SchemaError."""
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
    """The output is the answer."""
    return _of_parts({"answer": answer})


def calls_grammar(calls: Calls, answer: Part | None) -> str:
    """The output holds calls, or the answer: free text where that is None.

    Raises:
        SchemaError: a function's parameters.
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


def max_calls_bytes(calls: Calls) -> int | None:
    """Of an output that is nothing but calls; None if there is no bound, or none that is seen here."""
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
    """Of a call, up to its arguments."""
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
    """One call, or the list of them, between its marks."""
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
    """The rule ``start``: text, and behind it calls."""
    form = calls.form
    if not form.begin:
        return ["start: TEXT | calls\n", *_forced(calls), _TEXT_WITHOUT_CALLS]
    # Lazy: text ends where it can be a call's beginning, also where that is spelled though it has a token.
    begin = "begin" if calls.begin_token_id is None else f"(begin | TEXT <[{calls.begin_token_id}]>)"
    start = "start: section* TEXT\n" if calls.several and form.end else "start: section | TEXT\n"
    spelled = f"begin[lazy]: TEXT {json.dumps(form.begin)}\n"
    return [start, spelled, _section("section", begin, calls), _TEXT]


def _of_parts(parts: Mapping[str, Part]) -> str:
    named = [{"name": name, **part} for name, part in parts.items()]
    return json.dumps({"grammars": named}, ensure_ascii=False)
