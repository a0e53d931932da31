"""Largest size in bytes of a document under a schema, so that no larger output limit is reserved.

Every token has at least one byte. Only certain bounds count: each keyword bounds the documents that it accepts, and
the smallest bound of the keywords that all apply holds. Unknown keywords bound nothing.
"""

from collections.abc import Mapping
from typing import Any

from neaptide.server.structured.references import References

MAX_DEPTH = 64
"""Most references followed and nested schemas."""
_CHARACTER_BYTES = 12
"""Largest size of a character in a string: escaped as two surrogates."""
_NUMBER_BYTES = 32
"""Largest size of a listed number with a fraction, in any notation."""
_INTEGER_EXTRA_BYTES = 4
"""A sign, and a fraction of zeros if a compiler allows one."""
_FRACTION_DIGITS = 3
"""Most fraction digits of a ``multipleOf`` that bounds a number's length."""
_SEPARATOR_BYTES = 2
"""Size of a separator of items, or between key and value, in the layout that is written."""
_SCALARS = {"null": 4, "boolean": 5}
_FORMATS = {"uuid": 36, "ipv4": 15}
"""Most characters of each format. Others are written as patterns, which bound nothing here, some with a length."""


def max_document_bytes(schema: Any) -> int | None:
    """Largest size of a valid document in the compiler's layout; None if there is no known bound."""
    return _Bounds(schema).of(schema, 0)


class _Bounds:
    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._known: dict[int, int | None] = {}
        """Bounds by the schema's ``id``, so that a schema with many references is examined once."""

    def of(self, schema: Any, depth: int) -> int | None:
        if schema is False:
            return 0
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = None  # Within itself it has no bound.
            self._known[id(schema)] = self._of_schema(schema, depth)
        return self._known[id(schema)]

    def _of_schema(self, schema: Mapping[str, Any], depth: int) -> int | None:
        bounds = [self._by_type(schema, depth)]
        if "const" in schema:
            bounds.append(_value_bytes(schema["const"]))
        if isinstance(schema.get("enum"), list):
            bounds.append(max(map(_value_bytes, schema["enum"]), default=0))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                bounds.append(_largest([self.of(option, depth + 1) for option in schema[keyword]]))
        if isinstance(schema.get("allOf"), list):
            bounds += [self.of(part, depth + 1) for part in schema["allOf"]]
        if "$ref" in schema:
            bounds.append(self.of(self._references.target(schema["$ref"]), depth + 1))
        return min((bound for bound in bounds if bound is not None), default=None)

    def _by_type(self, schema: Mapping[str, Any], depth: int) -> int | None:
        kinds = schema.get("type")
        if isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, list):
            return None
        return _largest([self._of_kind(kind, schema, depth) for kind in kinds])

    def _of_kind(self, kind: Any, schema: Mapping[str, Any], depth: int) -> int | None:
        match kind:
            case "null" | "boolean":
                return _SCALARS[kind]
            case "integer":
                return _integer_bytes(schema)
            case "number":
                return _number_bytes(schema)
            case "string":
                return _string_bytes(schema)
            case "array":
                return self._array_bytes(schema, depth)
            case "object":
                return self._object_bytes(schema, depth)
        return None

    def _array_bytes(self, schema: Mapping[str, Any], depth: int) -> int | None:
        count, items = schema.get("maxItems"), schema.get("items")
        if count == 0:
            return 2
        first = schema.get("prefixItems")
        if isinstance(first, list) and items is False:
            bounds = [self.of(item, depth + 1) for item in first]
            known = [bound + _SEPARATOR_BYTES for bound in bounds if bound is not None]
            return 2 + sum(known) if len(known) == len(bounds) else None
        if not isinstance(count, int) or first is not None or not isinstance(items, dict):
            return None
        bound = self.of(items, depth + 1)
        return None if bound is None else 2 + count * (bound + _SEPARATOR_BYTES)

    def _object_bytes(self, schema: Mapping[str, Any], depth: int) -> int | None:
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is not False or "patternProperties" in schema:
            return None
        if not isinstance(properties, dict):
            return None
        total = 2
        for name, value in properties.items():
            bound = self.of(value, depth + 1)
            if bound is None:
                return None
            total += _text_bytes(len(name)) + bound + 2 * _SEPARATOR_BYTES
        return total


def _largest(bounds: list[int | None]) -> int | None:
    """Bound of a union."""
    known = [bound for bound in bounds if bound is not None]
    return max(known, default=0) if len(known) == len(bounds) else None


def _text_bytes(num_characters: int) -> int:
    return 2 + _CHARACTER_BYTES * num_characters


def _string_bytes(schema: Mapping[str, Any]) -> int | None:
    lengths = [schema.get("maxLength"), _FORMATS.get(str(schema.get("format")))]
    known = [length for length in lengths if isinstance(length, int)]
    return _text_bytes(min(known)) if known else None


def _integer_bytes(schema: Mapping[str, Any]) -> int | None:
    ends = []
    for names in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        numbers = [schema[name] for name in names if _is_number(schema.get(name))]
        if not numbers:
            return None
        ends.append(max(len(str(int(number))) for number in numbers))
    return max(ends) + _INTEGER_EXTRA_BYTES


def _number_bytes(schema: Mapping[str, Any]) -> int | None:
    """Largest size of a number: its bounds limit the whole part, a decimal ``multipleOf`` the fraction."""
    whole, step = _integer_bytes(schema), schema.get("multipleOf")
    if whole is None or not isinstance(step, int | float) or step != round(step, _FRACTION_DIGITS):
        return None
    return whole + _FRACTION_DIGITS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value_bytes(value: Any) -> int:
    """Largest size of a value that the schema lists."""
    match value:
        case str():
            return _text_bytes(len(value))
        case bool() | None:
            return 5
        case int():
            return len(str(value)) + _INTEGER_EXTRA_BYTES
        case list():
            return 2 + sum(_value_bytes(item) + _SEPARATOR_BYTES for item in value)
        case dict():
            pairs = value.items()
            return 2 + sum(_text_bytes(len(key)) + _value_bytes(item) + 2 * _SEPARATOR_BYTES for key, item in pairs)
    return _NUMBER_BYTES
