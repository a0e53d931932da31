"""Reads calls whose parameters stand between tags, one by one, with values that are written without quotes."""

import re
from dataclasses import dataclass
from typing import Any

from neaptide.server.parsers.calls import FoundCall, NoCallError, Offer, after_blank, as_json, cut_object, json_value
from neaptide.server.parsers.core import Parse
from neaptide.server.parsers.python_calls import json_or_python_value


@dataclass(frozen=True, slots=True)
class Tags:
    """Regular expressions of a format's tags."""

    call: str
    """Begins a call; its group is ``name``."""
    parameter: str
    """Begins a parameter; its groups are ``key``, and ``text`` if the tag says that the value is text."""
    parameter_end: str
    """Ends a parameter; plain text."""
    call_end: str = r"\Z"
    between: str = ""
    """Characters that may stand between calls, in addition to white space."""
    is_verbatim: bool = False
    """Whether the line ends around a value belong to it."""
    says_types: bool = False
    """Whether the tag of each parameter tells text from other values."""


def tagged_calls(tags: Tags) -> Parse:
    """Parser of calls with these tags."""
    return _TagReader(tags).parse


class _TagReader:
    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._blank = re.compile(rf"(?:\s|{tags.between})*" if tags.between else r"\s*")
        self._call, self._call_end = re.compile(tags.call), re.compile(tags.call_end)
        self._parameter = re.compile(tags.parameter, re.DOTALL)
        end = re.escape(tags.parameter_end)
        # A value may spell the tag that ends it: the one that counts is followed by another tag.
        self._value_end = re.compile(rf"{end}(?=\s*(?:{tags.parameter}|{tags.call_end}|\Z))")
        # Models also leave the tag out.
        self._next = re.compile(rf"\s*\n\s*(?={tags.parameter})")
        self._last = None if tags.call_end == r"\Z" else re.compile(rf"\s*(?={tags.call_end})")

    def parse(self, text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
        calls: list[FoundCall] = []
        position = self._skip(text, 0)
        while position < len(text):
            found = self._call.match(text, position)
            if found is None:
                if is_cut and calls:
                    break
                raise NoCallError("no call")
            name = found["name"].strip()
            arguments, position = self._arguments(text, found.end(), name, offer, is_cut)
            calls.append(FoundCall(name, arguments))
            position = self._skip(text, position)
        return calls

    def _skip(self, text: str, position: int) -> int:
        found = self._blank.match(text, position)
        return position if found is None else found.end()

    def _arguments(self, text: str, position: int, name: str, offer: Offer, is_cut: bool) -> tuple[str, int]:
        values: dict[str, Any] = {}
        while True:
            position = after_blank(text, position)
            parameter = self._parameter.match(text, position)
            if parameter is None:
                break
            key, start = parameter["key"].strip(), parameter.end()
            end = self._end_of_value(text, start, is_cut)
            if end is None:
                if not is_cut:
                    raise NoCallError("a value does not end")
                return self._cut(values, parameter, text[start:], name, offer), len(text)
            values[key] = self._value(parameter, text[start : end.start()], name, offer)
            position = end.end()
        ended = self._call_end.match(text, position)
        if ended is not None and (position < len(text) or not is_cut):
            return as_json(values), ended.end()
        if position < len(text) and not is_cut:
            raise NoCallError("text between parameters")
        return (cut_object(values) if is_cut else as_json(values)), len(text)

    def _end_of_value(self, text: str, start: int, is_cut: bool) -> re.Match[str] | None:
        found, other = self._value_end.search(text, start), self._next.search(text, start)
        if other is not None and (found is None or other.start() < found.start()):
            return other
        if found is None and self._last is not None and not is_cut:
            return self._last.search(text, start)
        return found

    def _value(self, parameter: re.Match[str], written: str, name: str, offer: Offer) -> Any:
        text = written if self._tags.is_verbatim else _without_line_ends(written)
        if self._tags.says_types:
            return text if parameter["text"] else json_value(text)
        return offer.value(name, parameter["key"].strip(), text, json_or_python_value)

    def _cut(self, values: dict[str, Any], parameter: re.Match[str], written: str, name: str, offer: Offer) -> str:
        """The beginning of an object whose last value was cut off, if that is text."""
        key, mark = parameter["key"].strip(), self._tags.parameter_end
        text, is_whole, _ = written.partition(mark)
        if is_whole:
            return cut_object({**values, key: self._value(parameter, text, name, offer)})
        is_text = parameter["text"] if self._tags.says_types else offer.types.get(name, {}).get(key) == "string"
        if not is_text:
            return cut_object(values)
        begun = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        text = text[: len(text) - begun]
        text = text if self._tags.is_verbatim else _without_line_ends(text)
        return as_json({**values, key: text})[:-2]


def _without_line_ends(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
