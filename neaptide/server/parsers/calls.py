"""Tool calls that a parser found in an output, and the tools that the request offers.

The output is untrusted: the parsers read each character a bounded number of times and evaluate nothing.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.http.jsonbody import parse_json
from neaptide.server.openai import replies

_ALPHANUMERIC = string.ascii_letters + string.digits
_WORDS = {"True": True, "False": False, "None": None}
"""Values that models write in Python's notation."""
_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


_BLANK = re.compile(r"\s*")


def after_blank(text: str, position: int) -> int:
    """The first place from ``position`` on that is no white space."""
    found = _BLANK.match(text, position)
    return position if found is None else found.end()


class NoCallError(ValueError):
    """The text is not exactly calls of offered tools."""


class FoundCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object; the beginning of one if the output was cut there."""
    id: str | None = None
    """The model's own id, in formats that have one."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call of a function that the caller offered."""

    id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it; the beginning of one if the output was cut there."""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are complete."""
        try:
            return isinstance(parse_json(self.arguments.encode(), of_a_model=True), dict)
        except InvalidRequestError:
            return False

    def as_message_part(self) -> replies.ToolCall:
        """The call as an entry of a message's ``tool_calls``."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Addition to one call of an output. The pieces of a call add up to the call."""

    index: int
    """Position of the call in the output."""
    id: str
    name: str
    arguments: str
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request."""

    names: frozenset[str]
    types: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """JSON types of each function's parameters, divided by commas. Formats that write values without quotes need
    them."""

    def tool(self, name: str) -> str | None:
        """The offered tool that a model means, or None. Some models write the namespace of functions before it."""
        if name in self.names:
            return name
        bare = name.removeprefix("functions.")
        return bare if bare in self.names else None

    def value(self, function: str, parameter: str, text: str, read: Callable[[str], Any] | None = None) -> Any:
        """The value of a parameter that the model wrote without quotes.

        Text stays text where the schema allows text alone. Elsewhere ``read`` reads it where it can, by default
        as JSON.
        """
        types = self.types.get(function, {}).get(parameter, "").split(",")
        if types == ["string"]:
            return text
        found = (read or json_value)(text)
        kind = _TYPES[type(found)]
        if "string" in types:
            return found if kind != "string" and kind in types else text
        if "boolean" in types and text.strip().lower() in ("true", "false"):
            return text.strip().lower() == "true"
        return found


def json_value(text: str) -> Any:
    """The JSON value in the text; the text itself if it is none."""
    stripped = text.strip()
    if stripped in _WORDS:
        return _WORDS[stripped]
    try:
        return parse_json(stripped.encode(), of_a_model=True)
    except (InvalidRequestError, ValueError):
        return text


def parameter_types(parameters: Mapping[str, Any] | None) -> dict[str, str]:
    """JSON types of a function's parameters, by name, for ``Offer.types``. A parameter of unknown type is omitted."""
    properties = (parameters or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    found = {name: ",".join(_types_of(schema)) for name, schema in properties.items()}
    return {name: types for name, types in found.items() if types}


def _types_of(schema: Any, depth: int = 0) -> list[str]:
    if not isinstance(schema, dict) or depth > 4:
        return []
    named = schema.get("type")
    types = [named] if isinstance(named, str) else [kind for kind in named or () if isinstance(kind, str)]
    for union in ("anyOf", "oneOf", "allOf"):
        options = schema.get(union)
        for option in options if isinstance(options, list) and not types else ():
            types += _types_of(option, depth + 1)
    if not types and isinstance(schema.get("enum"), list):
        types += [_TYPES[type(value)] for value in schema["enum"] if type(value) in _TYPES]
    return list(dict.fromkeys(types))


def as_json(value: Any) -> str:
    """A value as JSON. Raises NoCallError for text that no client can read."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NoCallError("a lone surrogate") from None
    return text


def cut_object(members: Mapping[str, Any]) -> str:
    """The beginning of an object: these members, and no end."""
    return as_json(members)[:-1]


NewId = Callable[[], str]


def call_id() -> str:
    """A new id as OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """A new id of nine letters and digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
