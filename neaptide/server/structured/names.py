"""Names of properties: ensures that each has one spelling and is not counted twice.

The compiler compares additional names with the schema's names by their spelling. With ``\\u0061`` for ``a`` a document
could have a second ``a`` that only ``additionalProperties`` restricts. Additional names are not compared with each
other, and a reader keeps the last of equal ones.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

SHORT_ESCAPES = 'nrbtf\\"'
"""All escapes but ``\\u``, and ``\\/``, which is never written."""
_ONLY_LONG = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
"""Characters without another escape."""
_NAMING = ("properties", "patternProperties", "required")


def allowed_escapes(schema: Mapping[str, Any]) -> str | None:
    """Escapes that the compiler may allow after a backslash; None for all of JSON's.

    Args:
        schema: as the compiler gets it.
    """
    return SHORT_ESCAPES if any(map(_is_open, _objects(schema))) else None


def unspelled(schema: Mapping[str, Any]) -> str | None:
    """The keyword with a character that ``SHORT_ESCAPES`` cannot spell; None if there is none."""
    for node in _objects(schema):
        for keyword in ("const", "enum", "required"):
            if _has_only_long(node.get(keyword)):
                return keyword
        if isinstance(node.get("properties"), dict) and _has_only_long(list(node["properties"])):
            return "properties"
    return None


def may_count_twice(node: Mapping[str, Any]) -> bool:
    """Whether ``minProperties`` needs several additional names, which could be equal."""
    fewest, required = node.get("minProperties"), node.get("required")
    named = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    if not isinstance(fewest, int | float) or fewest - len(named) < 2:
        return False
    return node.get("additionalProperties") is not False or bool(node.get("patternProperties"))


def _is_open(node: Mapping[str, Any]) -> bool:
    return node.get("additionalProperties") is not False and any(node.get(keyword) for keyword in _NAMING)


def _objects(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in it. That is more than the schemas, which is harmless here."""
    stack = [node]
    while stack:
        found = stack.pop()
        if isinstance(found, dict):
            yield found
            stack += found.values()
        elif isinstance(found, list):
            stack += found


def _has_only_long(value: Any) -> bool:
    match value:
        case str():
            return _ONLY_LONG.search(value) is not None
        case list():
            return any(map(_has_only_long, value))
        case dict():
            return any(_has_only_long(key) for key in value) or any(map(_has_only_long, value.values()))
    return False
