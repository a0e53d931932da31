"""Documents that are the same in another notation: the compiler writes each value in one way, and a schema allows more.

A number without a fraction may be written ``1`` and ``1.0``, members of an object come in any order. Both are written
out where that is cheap, into schemas that mean the same. The compiler reads numbers as doubles; what these cannot tell
apart is refused, or moved to the safe side.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any, NamedTuple

MAX_SAFE = (1 << 53) - 1
"""Integers up to here are doubles, and so are their neighbours."""
_MAX_WITH_FRACTION = 1 << 46
"""Up to here a double tells a number from itself and a tenth."""
_MAX_PERMUTED = 3
"""Parts of an object that may change places: each order is a grammar of its own."""
_MAX_VALUES = 32
"""Entries of an enumeration: more of them are written in one way each."""
MAX_PARTS = 256
"""Parts of all that a constant or an enumeration is written as: in each other their orders multiply."""
_LOWEST, _HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OLD_DRAFTS = re.compile(r"/draft-0?[3-7]/")
_STAY = frozenset({"$schema", "$id", "$anchor", "$defs", "definitions", "title", "description"})


def unheld_number(schema: Mapping[str, Any]) -> str | None:
    """The keyword whose number the compiler would take for another one."""
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
    """Bounds that are no doubles become the nearest ones that let nothing more pass."""
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
    """What a document's keywords mean."""

    is_old: bool
    """Of draft 7 or before: what stands beside a reference does not count, and lists of items are ``items``."""
    has_references: bool

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> "Dialect":
        return cls(_OLD_DRAFTS.search(str(schema.get("$schema"))) is not None, '"$ref"' in json.dumps(schema))


def write_values(schema: dict[str, Any], dialect: Dialect) -> None:
    """A constant or an enumeration whose values have several notations becomes alternatives."""
    keyword = "const" if "const" in schema else "enum"
    values = [schema[keyword]] if keyword == "const" else schema.get(keyword)
    kinds = schema.get("type", ())
    # A caller who says "integer" means to read one: its reader may know no fraction.
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
    """Of what ``_written`` makes of it."""
    match value:
        case list():
            return 1 + sum(map(num_parts, value))
        case dict():
            num_orders = math.factorial(len(value)) if len(value) <= _MAX_PERMUTED else 1
            return num_orders * (1 + sum(map(num_parts, value.values())))
    return 1


def _written(value: Any, dialect: Dialect) -> dict[str, Any]:
    """The value, in each of its notations; one that has but one is a constant."""
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
    # The only multiple of a tenth there, which has one digit behind the point or none.
    both = {"type": "number", "minimum": value, "exclusiveMaximum": _and_a_tenth(value), "multipleOf": 0.1}
    return both if value >= 0 else {"anyOf": [{"const": value}, both]}  # version 1.7 finds no negative one


def _and_a_tenth(value: int) -> float:
    return float(f"{value}.1") if value >= 0 else float(f"{value + 1}.9" if value < -1 else "-0.9")


def _object(members: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    properties = dict(members)
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def write_orders(schema: dict[str, Any], dialect: Dialect) -> None:
    """Objects of several parts, whose members the compiler writes part by part, may begin with any of them."""
    if dialect.has_references:  # places change here
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
    if "anyOf" in own or any('"allOf"' in json.dumps(part) for part in parts):  # each would have its own orders
        return
    for key in ("allOf", *(own if "properties" in own else ())):
        del schema[key]
    schema["anyOf"] = [{"allOf": [*order]} for order in permutations(parts)]


def add_condition(schema: dict[str, Any], condition: dict[str, Any]) -> None:
    """What the schema says holds as well."""
    others = schema.get("allOf", [])
    schema["allOf"] = [*(others if isinstance(others, list) else []), condition]
