"""Reads MiniMax M3's calls, whose arguments are nested elements: an object has named children, a list has items."""

import re
from collections.abc import Sequence
from typing import Any

from neaptide.server.parsers.calls import FoundCall, NoCallError, Offer, after_blank, as_json, cut_object

MARK = "]<]minimax[>["
"""Stands before every tag."""
_MAX_DEPTH = 48
_INVOKE = re.compile(rf"\s*{re.escape(MARK)}<invoke name=[\"']?(?P<name>[^\"'>]+)[\"']?>")
_INVOKE_END = re.compile(rf"\s*{re.escape(MARK)}</invoke>\s*")
_BEGIN = re.compile(rf"\s*{re.escape(MARK)}<(?P<key>[^/>][^>]*)>")
_ITEM = "item"

Element = str | Sequence[tuple[str, Any]]


class _CutError(NoCallError):
    """The text ends inside an element."""


def element_calls(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
    """The calls in a section's text. Raises NoCallError."""
    calls: list[FoundCall] = []
    position = 0
    while after_blank(text, position) < len(text):
        found = _INVOKE.match(text, position)
        if found is None:
            if is_cut and calls:
                break
            raise NoCallError("no call")
        values: dict[str, Any] = {}
        name, position = found["name"].strip(), found.end()
        try:
            while (ended := _INVOKE_END.match(text, position)) is None:
                key, element, position = _element(text, position, 0)
                values[key] = _value(element, name, key, offer)
        except _CutError:
            if not is_cut:
                raise
            return [*calls, FoundCall(name, cut_object(values))]
        calls.append(FoundCall(name, as_json(values)))
        position = ended.end()
    return calls


def _element(text: str, position: int, depth: int) -> tuple[str, Element, int]:
    """Name, content and end of the element at a position."""
    found = _BEGIN.match(text, position)
    if found is None:
        raise NoCallError("no element") if MARK in text[position:] else _CutError("the end")
    if depth > _MAX_DEPTH:
        raise NoCallError("too deep")
    key, position = found["key"].strip(), found.end()
    end = f"{MARK}</{key}>"
    children: list[tuple[str, Any]] = []
    while True:
        place = text.find(MARK, position)
        if place < 0:
            raise _CutError("the end")
        if text.startswith(end, place):
            written: Element = children if children else text[position:place]
            return key, written, place + len(end)
        if text[position:place].strip():
            raise NoCallError("text beside elements")
        child, element, position = _element(text, place, depth + 1)
        children.append((child, element))


def _value(element: Element, function: str, parameter: str, offer: Offer) -> Any:
    """The value of an element. Types are known for the parameters themselves, not for what is inside them."""
    types = offer.types.get(function, {}).get(parameter, "").split(",")
    if isinstance(element, str):
        if not element.strip() and "array" in types:
            return []
        if not element.strip() and "object" in types:
            return {}
        return offer.value(function, parameter, element)
    children = [(key, _value(child, function, f"{parameter}.{key}", offer)) for key, child in element]
    if "array" in types or {key for key, _ in children} == {_ITEM}:
        return [value for _, value in children]
    found: dict[str, Any] = {}
    for key, value in children:
        if key in found:
            raise NoCallError("a name twice")
        found[key] = value
    return found
