"""Adds the notations of equal values that a schema accepts and the compiler does not write.

A number without a fraction may be ``1`` or ``1.0``, and members of an object may have any order. Both are added where
that is cheap, as equivalent schemas. The compiler reads numbers as doubles. Numbers that doubles cannot distinguish are
refused, or rounded to the safe side.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any, NamedTuple

MAX_SAFE = (1 << 53) - 1
"""Largest integer up to which all integers are exact doubles."""
_MAX_WITH_FRACTION = 1 << 46
"""Bound below which doubles distinguish a number from itself plus a tenth."""
_MAX_PERMUTED = 3
"""Most parts of an object that are written in any order; each order is a grammar of its own."""
_MAX_VALUES = 32
"""Most entries of an enumeration that get several notations."""
MAX_PARTS = 256
"""Most parts that a constant or an enumeration becomes; nested orders multiply."""
_LOWEST, _HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OLD_DRAFTS = re.compile(r"/draft-0?[3-7]/")
_STAY = frozenset({"$schema", "$id", "$anchor", "$defs", "definitions", "title", "description"})


def unheld_number(schema: Mapping[str, Any]) -> str | None:
    """The keyword with a number that the compiler would change; None without one."""
    for keyword in ("const", "enum", "multipleOf"):
        if keyword in schema and not _is_safe(schema[keyword]):
            return keyword
    return None


def _is_safe(value: Any) -> bool:
    match value:
        case bool():
            return True
        case int():
            return abs(value) <= MAX_SAFE
        case list():
            return all(map(_is_safe, value))
        case dict():
            return all(map(_is_safe, value.values()))
    return True


def write_bounds(schema: dict[str, Any]) -> None:
    """Replaces bounds that are not exact doubles by the nearest ones that accept nothing more."""
    for keywords, side in ((_LOWEST, math.inf), (_HIGHEST, -math.inf)):
        for keyword in keywords:
            bound = schema.get(keyword)
            if isinstance(bound, int) and not isinstance(bound, bool) and abs(bound) > MAX_SAFE:
                schema[keyword] = _rounded(bound, side)


def _rounded(bound: int, side: float) -> int:
    nearest = float(bound)
    is_beyond = nearest < bound if side > 0 else nearest > bound
    return int(math.nextafter(nearest, side) if is_beyond else nearest)


class Dialect(NamedTuple):
    """Dialect of a document's keywords."""

    is_old: bool
    """Draft 7 or earlier: keywords next to a reference do not count, and tuples are ``items``."""
    has_references: bool

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "Dialect":
        return cls(_OLD_DRAFTS.search(str(schema.get("$schema"))) is not None, '"$ref"' in json.dumps(schema))


def write_values(schema: dict[str, Any], dialect: Dialect) -> None:
    """Replaces a constant or an enumeration whose values have several notations by alternatives."""
    keyword = "const" if "const" in schema else "enum"
    values = [schema[keyword]] if keyword == "const" else schema.get(keyword)
    kinds = schema.get("type", ())
    # A caller who writes "integer" may have a reader that accepts no fraction.
    if not isinstance(values, list) or "integer" in ([kinds] if isinstance(kinds, str) else kinds):
        return
    if len(values) > _MAX_VALUES or sum(map(num_parts, values)) > MAX_PARTS:
        return
    single: list[Any] = []
    several: list[dict[str, Any]] = []
    for value in values:
        written = _written(value, dialect)
        if "const" in written:
            single.append(value)
        else:
            several.append(written)
    if several:
        del schema[keyword]
        add_condition(schema, {"anyOf": [*several, *([{"enum": single}] if single else [])]})


def num_parts(value: Any) -> int:
    """Number of parts that ``_written`` makes of a value."""
    match value:
        case list():
            return 1 + sum(map(num_parts, value))
        case dict():
            num_orders = math.factorial(len(value)) if len(value) <= _MAX_PERMUTED else 1
            return num_orders * (1 + sum(map(num_parts, value.values())))
    return 1


def _written(value: Any, dialect: Dialect) -> dict[str, Any]:
    """A schema of the value in all its notations; a constant if it has only one."""
    match value:
        case bool():
            return {"const": value}
        case int() | float() if value == int(value) and abs(value) < _MAX_WITH_FRACTION:
            return _whole(int(value))
        case list() if value:
            first, rest = ("items", "additionalItems") if dialect.is_old else ("prefixItems", "items")
            items = [_written(item, dialect) for item in value]
            return {"type": "array", first: items, rest: False, "minItems": len(value)}
        case dict() if value:
            members = [(name, _written(member, dialect)) for name, member in value.items()]
            orders = permutations(members) if len(members) <= _MAX_PERMUTED else [members]
            return {"anyOf": [_object(order) for order in orders]}
    return {"const": value}


def _whole(value: int) -> dict[str, Any]:
    # The only multiple of a tenth in this range, with one decimal digit or none.
    both = {"type": "number", "minimum": value, "exclusiveMaximum": _and_a_tenth(value), "multipleOf": 0.1}
    return both if value >= 0 else {"anyOf": [{"const": value}, both]}  # Version 1.7 finds no negative one.


def _and_a_tenth(value: int) -> float:
    return float(f"{value}.1") if value >= 0 else float(f"{value + 1}.9" if value < -1 else "-0.9")


def _object(members: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    properties = dict(members)
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def write_orders(schema: dict[str, Any], dialect: Dialect) -> None:
    """Allows objects of up to three parts to begin with any part; the compiler writes them part by part."""
    if dialect.has_references:  # Paths change here.
        return
    own = {key: child for key, child in schema.items() if key not in _STAY and key != "allOf"}
    others = schema.get("allOf")
    if not isinstance(others, list):
        return
    parts = [own, *others] if "properties" in own else others
    if not 1 < len(parts) <= _MAX_PERMUTED or not all(
        isinstance(part, dict) and "properties" in part for part in parts
    ):
        return
    if "anyOf" in own or any('"allOf"' in json.dumps(part) for part in parts):  # Each part would have its own orders.
        return
    for key in ("allOf", *(own if "properties" in own else ())):
        del schema[key]
    schema["anyOf"] = [{"allOf": [*order]} for order in permutations(parts)]


def add_condition(schema: dict[str, Any], condition: dict[str, Any]) -> None:
    """Adds a condition that also applies."""
    others = schema.get("allOf", [])
    schema["allOf"] = [*(others if isinstance(others, list) else []), condition]
