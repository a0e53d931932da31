"""Mutually exclusive alternatives: if no document is valid under two of them, ``oneOf`` equals ``anyOf``.

The compiler detects exclusion only by constant strings on the first level. Callers' unions also differ by types behind
references, by numbers, and by unions within unions. Only certain results count: alternatives that may share a document
are left for the compiler to refuse. So are those that refer back to their union (ADR 14 explains why).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

from neaptide.server.structured.references import References

MAX_ALTERNATIVES = 64
"""Most entries of a ``oneOf``, as all pairs are compared."""
_MAX_LOOKS = 100_000
"""Most schemas and pairs of schemas that are examined per document."""
_MAX_DEPTH = 16
"""Most references followed and levels of members; deeper schemas count as unknown."""
_KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_OF_TYPE = {kind: frozenset({kind}) for kind in _KINDS - {"fraction"}} | {"number": frozenset({"integer", "fraction"})}

Conditions = Sequence[Mapping[str, Any]]
"""Schemas that all apply, without references and ``allOf``."""


class Alternatives:
    """Alternatives of one document.

    Args:
        root: the whole schema, as the caller wrote it.
        is_old: keywords next to a reference do not count.
    """

    def __init__(self, root: Any, *, is_old: bool) -> None:
        self._references = References(root)
        self._is_old = is_old
        self._looks_left = _MAX_LOOKS

    def exclude_each_other(self, schema: Mapping[str, Any]) -> bool:
        """Whether no document is valid under two entries of the schema's ``oneOf``."""
        options = schema.get("oneOf")
        if not isinstance(options, list) or not 0 < len(options) <= MAX_ALTERNATIVES:
            return False
        beside = {key: value for key, value in schema.items() if key != "oneOf"}
        try:
            if self._lead_back(options, schema):
                return False
            views = [_View(self, [beside, option], 0) for option in options]
            return all(one.excludes(other) for one, other in combinations(views, 2))
        except _TooMuchError:
            return False

    def _lead_back(self, options: Sequence[Any], union: Mapping[str, Any]) -> bool:
        seen: set[int] = set()
        todo = [*options]
        while todo:
            node = todo.pop()
            if node is union:
                return True
            if not isinstance(node, dict | list) or id(node) in seen:
                continue
            self.look()
            seen.add(id(node))
            if isinstance(node, dict) and "$ref" in node:
                todo.append(self._references.target(node["$ref"]))
            todo += node.values() if isinstance(node, dict) else node
        return False

    def look(self) -> None:
        """Counts one examined schema.

        Raises:
            _TooMuchError: the limit is exceeded.
        """
        self._looks_left -= 1
        if self._looks_left < 0:
            raise _TooMuchError

    def flat(self, schemas: Sequence[Any], depth: int) -> list[Mapping[str, Any]]:
        """The schemas that all apply, with references followed."""
        found: list[Mapping[str, Any]] = []
        for schema in schemas if depth <= _MAX_DEPTH else ():
            self.look()
            if schema is False:
                found.append({"enum": []})
            if not isinstance(schema, dict):
                continue
            has_reference = "$ref" in schema
            if has_reference:
                found += self.flat([self._references.target(schema["$ref"])], depth + 1)
            if has_reference and self._is_old:
                continue
            found.append(schema)
            if isinstance(schema.get("allOf"), list):
                found += self.flat(schema["allOf"], depth + 1)
        return found


class _TooMuchError(Exception):
    """The comparison would take too long."""


class _View:
    """Certain facts about documents that are valid under several schemas."""

    def __init__(self, alternatives: Alternatives, schemas: Sequence[Any], depth: int) -> None:
        self._alternatives = alternatives
        self._depth = depth
        self._conditions: Conditions = alternatives.flat(schemas, depth)
        self._members: dict[str, _View] = {}

    def excludes(self, other: "_View") -> bool:
        self._alternatives.look()
        if self._plainly_excludes(other):
            return True
        if self.kinds & other.kinds == {"object"}:
            members = [(self._member(name), other._member(name)) for name in sorted(self.required & other.required)]
            # A constant distinguishes most members, so members with members come last.
            if any(mine._plainly_excludes(its) for mine, its in members):
                return True
            if any(mine.excludes(its) for mine, its in members):
                return True
        return any(
            all(branch.excludes(there) for branch in branches)
            for here, there in ((self, other), (other, self))
            for branches in here._branches
        )

    def _plainly_excludes(self, other: "_View") -> bool:
        return not self.kinds & other.kinds or _are_apart(self.values, other.values)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Possible types of the value, with whole numbers as a type of their own."""
        kinds = _KINDS
        for condition in self._conditions:
            named = condition.get("type")
            if isinstance(named, str | list):
                names = [named] if isinstance(named, str) else named
                kinds &= frozenset().union(*(_OF_TYPE.get(str(name), _KINDS) for name in names))
        if self.values is not None:
            kinds &= frozenset(kind for kind, _ in self.values)
        return kinds

    @cached_property
    def values(self) -> frozenset[tuple[str, Any]] | None:
        """All possible values; None if they are not listed."""
        values: frozenset[tuple[str, Any]] | None = None
        for condition in self._conditions:
            for listed in ([condition["const"]] if "const" in condition else None, condition.get("enum")):
                if isinstance(listed, list):
                    keys = frozenset(map(_key, listed))
                    values = keys if values is None else values & keys
        return values

    @cached_property
    def required(self) -> frozenset[str]:
        """Required members of an object."""
        names: set[str] = set()
        for condition in self._conditions:
            if isinstance(condition.get("required"), list):
                names.update(name for name in condition["required"] if isinstance(name, str))
        return frozenset(names)

    def _member(self, name: str) -> "_View":
        if name not in self._members:
            schemas = []
            for condition in self._conditions:
                properties = condition.get("properties")
                if isinstance(properties, dict) and name in properties:
                    schemas.append(properties[name])
            self._members[name] = _View(self._alternatives, schemas, self._depth + 1)
        return self._members[name]

    @cached_property
    def _branches(self) -> "list[list[_View]]":
        """The alternatives of each union among the conditions."""
        found = []
        for condition in self._conditions:
            for keyword in ("anyOf", "oneOf"):
                options = condition.get(keyword)
                if isinstance(options, list) and self._depth < _MAX_DEPTH:
                    found.append([_View(self._alternatives, [option], self._depth + 1) for option in options])
        return found


def _are_apart(one: frozenset[Any] | None, other: frozenset[Any] | None) -> bool:
    return one is not None and other is not None and not one & other


def _key(value: Any) -> tuple[str, Any]:
    """A key that is equal for values that are equal in JSON Schema, with their type."""
    match value:
        case None:
            return "null", None
        case bool():
            return "boolean", value
        case int() | float():
            return "integer" if value == int(value) else "fraction", value
        case str():
            return "string", value
        case list():
            return "array", tuple(map(_key, value))
    return "object", frozenset((name, _key(member)) for name, member in value.items())
