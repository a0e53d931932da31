"""Prepares callers' JSON Schemas for the grammar compiler, and explains its complaints.

Keywords that the compiler would enforce less strictly than a validator are rewritten or refused. A schema that is
enforced in part gives wrong answers that look right.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from neaptide.server.structured.alternatives import Alternatives
from neaptide.server.structured.formats import INTEGERS, WRITTEN_OUT
from neaptide.server.structured.names import allowed_escapes, may_count_twice, unspelled
from neaptide.server.structured.notations import (
    Dialect,
    add_condition,
    unheld_number,
    write_bounds,
    write_orders,
    write_values,
)
from neaptide.server.structured.patterns import in_our_dialect

MAX_GRAMMAR_CHARS = 1 << 16
"""Longest schema, regular expression or grammar."""
MAX_WRITTEN_CHARS = 1 << 20
"""Longest schema after rewriting, which lengthens some keywords."""
MAX_DEPTH = 64
"""Deepest schema; compilers of this kind have crashed on deep ones."""
COMPILER_OPTIONS: dict[str, Any] = {
    # One layout: given a choice, a weak model writes endless white space.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
TOO_COMPLEX = "The schema is too complex."
_OPTIONS_KEY = "x-guidance"

_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
_UNHELD = ("contentMediaType", "contentEncoding")
"""Keywords that the compiler ignores."""

_BESIDE_REFERENCE = frozenset({"$ref", "$schema", "$id", "$anchor", "$defs", "definitions"})
"""Keywords that count next to a reference in older drafts: a name, and definitions for other references."""

_KEYWORDS = (
    *("additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies"),
    *("dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "if"),
    *("items", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems"),
    *("minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties"),
    *("prefixItems", "properties", "propertyNames", "required", "then", "type", "unevaluatedItems"),
    *("unevaluatedProperties", "uniqueItems", "$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef"),
    *("$ref", "$schema", "$vocabulary"),
)


class SchemaError(ValueError):
    """The schema cannot be enforced; the message names the keyword and quotes nothing else of it."""


def prepare_schema(schema: Any) -> dict[str, Any]:
    """A schema that the compiler enforces exactly, or refuses.

    Raises:
        SchemaError: it has a keyword that the compiler would ignore, or is too long or too deep.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise SchemaError("A schema must be an object.")
    if len(json.dumps(schema, ensure_ascii=False)) > MAX_GRAMMAR_CHARS:
        raise SchemaError(f"The schema has more than {MAX_GRAMMAR_CHARS} characters.")
    dialect = Dialect.of(schema)
    prepared = _prepare(schema, 0, dialect, Alternatives(schema, is_old=dialect.is_old))
    assert isinstance(prepared, dict)
    if len(json.dumps(prepared, ensure_ascii=False)) > MAX_WRITTEN_CHARS:
        raise SchemaError(TOO_COMPLEX)
    escapes = allowed_escapes(prepared)
    if escapes is None:
        return prepared | {_OPTIONS_KEY: COMPILER_OPTIONS}
    if (keyword := unspelled(schema)) is not None:
        raise SchemaError(_not_held(keyword))
    return prepared | {_OPTIONS_KEY: COMPILER_OPTIONS | {"json_allowed_escapes": escapes}}


def _prepare(node: Any, depth: int, dialect: Dialect, alternatives: Alternatives, *, of_names: bool = False) -> Any:
    """A copy of a (sub)schema, of a list of them, or of a mapping from names to them."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"The schema has more than {MAX_DEPTH} levels.")
    if isinstance(node, list):
        return [_prepare(child, depth + 1, dialect, alternatives) for child in node]
    if not isinstance(node, dict):
        return node
    if of_names:
        return {name: _prepare(child, depth + 1, dialect, alternatives) for name, child in node.items()}
    _check_held(node, depth)
    counts = _BESIDE_REFERENCE if dialect.is_old and "$ref" in node else node.keys()
    copy = {
        key: child if key in _VALUES else _prepare(child, depth + 1, dialect, alternatives, of_names=key in _OF_NAMES)
        for key, child in node.items()
        if key in counts and key != _OPTIONS_KEY
    }
    if "oneOf" in copy and alternatives.exclude_each_other(node):
        options = copy.pop("oneOf")
        if "anyOf" in copy:
            add_condition(copy, {"anyOf": options})
        else:
            copy["anyOf"] = options
    _write_out(copy)
    write_bounds(copy)
    write_values(copy, dialect)
    write_orders(copy, dialect)
    return copy


def _check_held(node: Mapping[str, Any], depth: int) -> None:
    for keyword in _UNHELD:
        if keyword in node:
            raise SchemaError(_not_held(keyword))
    if "$ref" in node and "$id" in node and depth:  # Drafts differ in which of the two bases counts.
        raise SchemaError(_not_held("$id"))
    if may_count_twice(node):
        raise SchemaError(_not_held("minProperties"))
    keyword_of_number = unheld_number(node)
    if keyword_of_number is not None:
        raise SchemaError(_not_held(keyword_of_number))


def _write_out(schema: dict[str, Any]) -> None:
    """Rewrites expressions and formats."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = in_our_dialect(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {in_our_dialect(key): child for key, child in schema["patternProperties"].items()}
    form = schema.get("format")
    written_out = WRITTEN_OUT.get(form) if isinstance(form, str) else None
    if schema.get("type") == "integer" and form in INTEGERS:
        low, high = INTEGERS[form]
        written_out = {"minimum": low, "maximum": high}
    if written_out is not None:
        del schema["format"]
        of_type = {"type": schema["type"]} if "type" in schema else {}  # Its length bounds strings only.
        if written_out:
            add_condition(schema, of_type | written_out)


def explain(complaint: str) -> str:
    """The compiler's complaint about a schema, without its quotations."""
    for keyword in _named(complaint):
        return _not_held(keyword)
    if "atisfiable" in complaint:
        return "No document can satisfy the schema."
    if re.search("too (large|complex|big|many|deep)|limit|fuel", complaint):
        return TOO_COMPLEX
    return "The schema cannot be enforced."


def _named(complaint: str) -> Iterator[str]:
    """Keywords that the complaint names, in order."""
    if complaint.startswith("Unknown format"):
        yield "format"
    elif complaint.startswith("patternProperty"):
        yield "patternProperties"
    elif complaint.startswith(("Resource", "Anchor", "Pointer")):
        yield "$ref"
    elif "regex parse error" in complaint or "invalid regex" in complaint:
        yield "pattern"
    elif "float range" in complaint or "integer range" in complaint:
        yield "minimum" if "min=Some" in complaint else "maximum"
    elif complaint.startswith("min/maxProperties"):
        yield "minProperties"
    else:
        for word in re.findall(r"\$?[A-Za-z]+", complaint.partition("while processing")[0]):
            if word in _KEYWORDS:
                yield word


def _not_held(keyword: str) -> str:
    return f"The schema cannot be enforced: keyword '{keyword}' is not supported as it is used."
