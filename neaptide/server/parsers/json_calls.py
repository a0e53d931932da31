"""Reads calls whose arguments are JSON: objects with a name and arguments, or a head with the name before them.

Models write more than their documentation says: arguments as a string, ``parameters`` for ``arguments``, the OpenAI
API's own nesting, ids, several objects after each other. All of it is read, in every format.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial

from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.http.jsonbody import parse_object
from neaptide.server.parsers.calls import FoundCall, NoCallError, Offer, after_blank, as_json
from neaptide.server.parsers.core import Parse

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")
_IDS = ("id", "tool_call_id", "call_id")
_OTHERS = ("type", "index")
_KEYS = frozenset((*_NAMES, *_ARGUMENTS, *_IDS, *_OTHERS))
_BETWEEN = re.compile(r"\s*[;,]?\s*")
_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\s*(?:```\s*)?\Z", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_decoder = json.JSONDecoder(parse_int=str, strict=False)

Members = Mapping[str, str]
"""Keys of an object, with the JSON of each value. The last one may be incomplete if the output was cut."""
Read = Callable[[Members, bool], FoundCall]
"""Reads one object; the flag says that the output was cut inside it."""


def is_open_json(body: str) -> bool:
    """Whether the text ends inside a string of JSON, which may spell any mark."""
    return '"' in _STRING.sub("", body)


def json_calls(*, keeps_ids: bool = False, read: Read | None = None) -> Parse:
    """Parser of an object, several objects, or a list of objects.

    Args:
        keeps_ids: whether the model's ids are unique, so that the reply uses them.
        read: reads one object, where it is not as usual.
    """
    read_one = read or partial(_call_of, keeps_ids=keeps_ids)

    def parse(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
        fence = _FENCE.match(text)
        objects, last = _objects(_with_single_braces(text if fence is None else fence.group(1)), is_cut)
        wrapper = objects[0] if objects else last or {}
        if wrapper.keys() == {"tool_calls"} and len(objects) <= 1:
            return parse(wrapper["tool_calls"], offer, is_cut)
        calls = [read_one(members, False) for members in objects]
        if last is not None:
            try:
                calls.append(read_one(last, True))
            except ValueError:
                if not calls:
                    raise
        return calls

    return parse


def headed_calls(head: str, tail: str = "") -> Parse:
    """Parser of calls with the name before the arguments.

    Args:
        head: expression before the arguments; its groups are ``name``, and ``id`` if the format has ids.
        tail: expression after them.
    """
    head_pattern, tail_pattern = re.compile(head), re.compile(tail)

    def parse(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
        calls: list[FoundCall] = []
        position = after_blank(text, 0)
        while position < len(text):
            found = head_pattern.match(text, position)
            if found is None:
                if is_cut and calls:
                    break
                raise NoCallError("no head of a call")
            start = found.end()
            end = _end_of_value(text, start)
            if end is None and not is_cut:
                after = tail_pattern.match(text, start)
                if start < len(text) and (after is None or after.end() == start):
                    raise NoCallError("no arguments")
                end = start
            arguments = _arguments(text[start:end], end is None)
            groups = found.groupdict()
            calls.append(FoundCall(groups["name"].strip(), arguments, groups.get("id")))
            if end is None:
                break
            after = tail_pattern.match(text, end)
            position = end if after is None else after.end()
            position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        return calls

    return parse


def _with_single_braces(text: str) -> str:
    """The text without the second braces that models copy from a prompt which was meant for a formatter."""
    stripped = text.strip()
    if not stripped.startswith("{{"):
        return text
    return stripped[1:-1] if stripped.endswith("}}") and not is_open_json(stripped) else stripped[1:]


def named_by_key(members: Members, is_cut: bool) -> FoundCall:
    """Reads an object whose only key is the function's name, as Apertus writes."""
    if len(members) != 1:
        raise NoCallError("not one function")
    ((name, raw),) = members.items()
    return FoundCall(name, _arguments(raw, is_cut))


def _objects(text: str, is_cut: bool) -> tuple[list[Members], Members | None]:
    """The complete objects, and the one in which the output was cut."""
    position = after_blank(text, 0)
    is_list = text[position : position + 1] == "["
    position = after_blank(text, position + is_list)
    objects: list[Members] = []
    while position < len(text):
        if is_list and text[position] == "]":
            position, is_list = after_blank(text, position + 1), False
            if position < len(text):
                raise NoCallError("text after the list")
            break
        members, end = _members(text, position, is_cut)
        if end is None:
            return objects, members
        objects.append(members)
        position = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    if is_list and not is_cut:
        raise NoCallError("the list does not end")
    return objects, None


def _members(text: str, position: int, is_cut: bool) -> tuple[dict[str, str], int | None]:
    """The members of the object at a position, and its end; None if the text ends inside it."""
    if text[position : position + 1] != "{":
        raise NoCallError("no object")
    position = after_blank(text, position + 1)
    members: dict[str, str] = {}
    while position < len(text) and text[position] != "}":
        if members:
            position = after_blank(text, _after(text, position, ","))
        key, position = _key(text, position, is_cut)
        if position >= len(text):
            break
        if key in members:
            raise NoCallError("a key twice")
        position = after_blank(text, _after(text, position, ":"))
        end = _end_of_value(text, position)
        if end is None and not is_cut:
            raise NoCallError("no value")
        members[key] = text[position:end]
        position = len(text) if end is None else after_blank(text, end)
    if position < len(text):
        return members, position + 1
    if not is_cut:
        raise NoCallError("the object does not end")
    return members, None


def _key(text: str, position: int, is_cut: bool) -> tuple[str, int]:
    try:
        key, end = _decoder.raw_decode(text, position)
    except ValueError:
        if is_cut:
            return "", len(text)
        raise NoCallError("no key") from None
    if not isinstance(key, str):
        raise NoCallError("a key that is no text")
    return key, after_blank(text, end)


def _after(text: str, position: int, mark: str) -> int:
    if text[position : position + 1] != mark:
        raise NoCallError(f"no {mark}")
    return position + 1


def _end_of_value(text: str, position: int) -> int | None:
    """End of the JSON value at a position; None if there is no complete one."""
    try:
        _, end = _decoder.raw_decode(text, position)
    except (ValueError, RecursionError):
        return None
    return end


def _call_of(members: Members, is_cut: bool, *, keeps_ids: bool = False) -> FoundCall:
    if not members.keys() <= _KEYS:
        raise NoCallError("other keys")
    function = members.get("function", "")
    if function.startswith("{"):
        inner, _ = _members(function, 0, is_cut)
        outer = {key: value for key, value in members.items() if key != "function"}
        return _call_of({**outer, **inner}, is_cut, keeps_ids=keeps_ids)
    name = next((_text(members[key]) for key in _NAMES if key in members), "")
    raw = next((members[key] for key in _ARGUMENTS if key in members), "")
    call_id = next((_text(members[key]) for key in _IDS if key in members), None) if keeps_ids else None
    return FoundCall(name, _arguments(raw, is_cut), call_id)


def _text(raw: str) -> str:
    value = json.loads(raw)
    if not isinstance(value, str):
        raise NoCallError("a name that is no text")
    return value


def _arguments(raw: str, is_cut: bool = False) -> str:
    """The arguments' own text. Only a string that holds them, or text that JSON forbids, is written anew."""
    if is_cut and _end_of_value(raw, 0) is None:
        return _beginning(raw)
    if raw.startswith('"'):
        raw = json.loads(raw, strict=False)
    if raw.strip() in ("", "null"):
        return "{}"
    try:
        parse_object(raw.encode(), of_a_model=True)
    except InvalidRequestError:
        if all(character >= " " for character in raw):
            raise
        raw = as_json(json.loads(raw, strict=False))  # Line ends inside a string.
        parse_object(raw.encode(), of_a_model=True)
    return raw


def _beginning(raw: str) -> str:
    """The beginning of arguments that were cut off."""
    if not raw.startswith('"'):
        return raw if raw.startswith("{") else ""
    whole = re.match(r'"(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*', raw)
    found = json.loads(whole.group() + '"', strict=False) if whole else ""
    return found if isinstance(found, str) else ""
