"""Reads calls in Python's notation, and objects with bare keys. Nothing is evaluated, and the depth is bounded."""

import re
from typing import Any, NamedTuple

from neaptide.server.parsers.calls import FoundCall, NoCallError, Offer, after_blank, as_json, cut_object, json_value
from neaptide.server.parsers.core import Parse

_MAX_DEPTH = 48
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WORDS: dict[str, Any] = {
    **{"True": True, "False": False, "None": None},
    **{"true": True, "false": False, "null": None},
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class Notation(NamedTuple):
    """How values are written."""

    quotes: tuple[str, ...] = ('"""', "'''", '"', "'")
    has_escapes: bool = True
    bare_ends: str = ""
    """Characters that end a text without quotes; empty if every text has quotes."""


class _CutCallError(NoCallError):
    """The text ends too early."""


def python_calls(suffix: str = "") -> Parse:
    """Parser of ``f(a=1), g(b="x")``, in a list or one per line. ``suffix`` may follow a name, such as ``.call``."""

    def parse(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
        reader = _Reader(text, Notation())
        is_list = reader.take("[")
        calls: list[FoundCall] = []
        try:
            while not reader.is_at_end():
                if is_list and reader.take("]"):
                    is_list = False
                    if not reader.is_at_end():
                        raise NoCallError("text after the list")
                    break
                name = reader.name().removesuffix(suffix)
                reader.expect("(")
                calls.append(FoundCall(name, _object(reader, "=", ")", is_cut)))
                if not (reader.take(",") or reader.take(";")):
                    continue
        except _CutCallError:
            if not (is_cut and calls):
                raise
        if is_list and not is_cut:
            raise NoCallError("the list does not end")
        return calls

    return parse


def dict_calls(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
    """The calls in dictionaries of Python's notation, as ``{'name': 'f', 'arguments': {'a': 1}}``.

    Raises:
        NoCallError: the text is something else.
    """
    reader = _Reader(text, Notation())
    calls: list[FoundCall] = []
    while not reader.is_at_end():
        value = reader.value(0)
        if not isinstance(value, dict) or not value.keys() <= {"name", "arguments", "parameters", "type", "id"}:
            raise NoCallError("no call")
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise NoCallError("no call")
        calls.append(FoundCall(name, as_json(arguments)))
        reader.take(",")
    return calls


def object_calls(notation: Notation) -> Parse:
    """Parser of ``call:f{a:1,b:<mark>x<mark>}``, one or several."""

    def parse(text: str, offer: Offer, is_cut: bool) -> list[FoundCall]:
        reader = _Reader(text, notation)
        calls: list[FoundCall] = []
        try:
            while not reader.is_at_end():
                if not reader.take("call:"):
                    raise NoCallError("no call")
                name = reader.name()
                reader.expect("{")
                calls.append(FoundCall(name, _object(reader, ":", "}", is_cut)))
                reader.take(",")
        except _CutCallError:
            if not (is_cut and calls):
                raise
        return calls

    return parse


def json_or_python_value(text: str) -> Any:
    """The value in the text, in JSON or in Python's notation; the text itself if it is neither."""
    value = json_value(text)
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        reader = _Reader(value, Notation())
        try:
            found = reader.value(0)
            return found if reader.is_at_end() else value
        except ValueError:
            return value
    return value


def _object(reader: "_Reader", sign: str, end: str, is_cut: bool) -> str:
    """The arguments as JSON; the complete ones alone if the text ends inside them."""
    values: dict[str, Any] = {}
    try:
        reader.members(values, sign, end, 0)
    except _CutCallError:
        if not is_cut:
            raise
        reader.position = len(reader.text)
        return cut_object(values)
    return as_json(values)


class _Reader:
    def __init__(self, text: str, notation: Notation) -> None:
        self.text, self.position = text, 0
        self._notation = notation

    def is_at_end(self) -> bool:
        self._skip()
        return self.position >= len(self.text)

    def _skip(self) -> None:
        self.position = after_blank(self.text, self.position)

    def take(self, mark: str) -> bool:
        """Whether the mark comes next; it is then passed over."""
        self._skip()
        is_next = self.text.startswith(mark, self.position)
        self.position += len(mark) * is_next
        return is_next

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise _CutCallError("the end") if self.is_at_end() else NoCallError(f"no {mark}")

    def name(self) -> str:
        self._skip()
        found = _NAME.match(self.text, self.position)
        if found is None:
            raise _CutCallError("the end") if self.is_at_end() else NoCallError("no name")
        self.position = found.end()
        return found.group()

    def members(self, values: dict[str, Any], sign: str, end: str, depth: int) -> None:
        """Reads names and values up to ``end`` into ``values``."""
        while not self.take(end):
            if values and not self.take(","):
                raise _CutCallError("the end") if self.is_at_end() else NoCallError("no comma")
            if values and self.take(end):
                return
            key = self._string()
            key = self.name() if key is None else key
            self.expect(sign)
            value = self.value(depth + 1)
            if key in values:
                raise NoCallError("a name twice")
            values[key] = value

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise NoCallError("too deep")
        self._skip()
        if (text := self._string()) is not None:
            return text
        for begin, end in (("[", "]"), ("(", ")")):
            if self.take(begin):
                return self._list(end, depth)
        if self.take("{"):
            values: dict[str, Any] = {}
            self.members(values, ":", "}", depth)
            return values
        return self._word()

    def _list(self, end: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.take(end):
            if items and not self.take(","):
                raise _CutCallError("the end") if self.is_at_end() else NoCallError("no comma")
            if items and self.take(end):
                break
            items.append(self.value(depth + 1))
        return items

    def _word(self) -> Any:
        """A number or a word; the text may go on if it ends there."""
        found = _NUMBER.match(self.text, self.position) or _NAME.match(self.text, self.position)
        end = self.position if found is None else found.end()
        written = self.text[self.position : end]
        follows = self.text[end : end + 1]
        ends = self._notation.bare_ends
        if (ends and follows and follows not in ends and not follows.isspace()) or (ends and not written):
            end = next((i for i in range(self.position, len(self.text)) if self.text[i] in ends), len(self.text))
            written, follows = self.text[self.position : end].strip(), self.text[end : end + 1]
        if not follows:
            raise _CutCallError("the end")
        self.position = end
        if written in _WORDS:
            return _WORDS[written]
        if written and _NUMBER.fullmatch(written):
            return _number(written)
        if ends and written:
            return written
        raise NoCallError("no value")

    def _string(self) -> str | None:
        """The string that comes next; None if there is none."""
        self._skip()
        quote = next((q for q in self._notation.quotes if self.text.startswith(q, self.position)), None)
        if quote is None:
            return None
        start = self.position + len(quote)
        if not self._notation.has_escapes:
            end = self.text.find(quote, start)
            if end < 0:
                raise _CutCallError("the end")
            self.position = end + len(quote)
            return self.text[start:end]
        pieces: list[str] = []
        stop = re.compile(rf"{re.escape(quote)}|\\")
        while (found := stop.search(self.text, start)) is not None:
            pieces.append(self.text[start : found.start()])
            if found.group() == quote:
                self.position = found.end()
                return "".join(pieces)
            piece, start = self._escape(found.end())
            pieces.append(piece)
        raise _CutCallError("the end")

    def _escape(self, position: int) -> tuple[str, int]:
        letter = self.text[position : position + 1]
        if digits := _HEX_ESCAPES.get(letter, 0):
            code = self.text[position + 1 : position + 1 + digits]
            try:
                return _paired(chr(int(code, 16))), position + 1 + digits
            except (ValueError, OverflowError):
                raise NoCallError("a wrong escape") from None
        return _ESCAPES.get(letter, "\\" + letter), position + 1


def _paired(character: str) -> str:
    if "\ud800" <= character <= "\udfff":
        raise NoCallError("a lone surrogate")
    return character


def _number(written: str) -> int | float:
    text = written.replace("_", "").lstrip("+")
    try:
        return int(text) if text.lstrip("-").isdigit() else _finite(float(text))
    except ValueError:
        raise NoCallError("no number") from None


def _finite(value: float) -> float:
    if value in (float("inf"), float("-inf")):
        raise NoCallError("too large")
    return value
