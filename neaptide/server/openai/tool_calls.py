"""Parses tool calls in a model's output; ``structured.call_formats`` describes their formats.

The output is untrusted. The parser reads each character a bounded number of times, holds back a bounded part, and
evaluates nothing. Everything that is not exactly a call of an offered tool stays text, including a call that the end
of the output cuts off.
"""

import json
import secrets
from collections.abc import Iterator, Set
from dataclasses import dataclass

import msgspec

from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.http.jsonbody import parse_json
from neaptide.server.openai import replies
from neaptide.server.structured.call_formats import HERMES, CallFormat

MAX_CALL_CHARS = 1 << 16
MAX_CALLS = 128
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call of a function that the caller offered."""

    id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""

    def as_message_part(self) -> replies.ToolCall:
        """The call as an entry of a message's ``tool_calls``."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits output text into shown text and calls, however the text is split into pieces.

    A call is known only at its end, so its text is held back until then. White space at the start and after a call is
    held back too: it belongs to the format, unless other text follows.
    """

    def __init__(self, names: Set[str], form: CallFormat = HERMES, *, max_calls: int = MAX_CALLS) -> None:
        self.calls: list[ParsedToolCall] = []
        self._names = names
        self._form = form
        self._max_calls = max_calls
        self._tail = ""  # Outside a call: text that may begin one. Inside: text that may end it.
        self._body: list[str] | None = None  # Inside a call: its text up to the tail.
        self._body_chars = 0
        self._blank: list[str] | None = []  # White space held back; None while text is shown.
        self._may_begin = True
        """Whether only white space has come so far, for formats in which calls are the whole output."""

    def push(self, piece: str) -> str:
        """The text that may be shown now. New calls are appended to ``calls``."""
        shown: list[str] = []
        text, position = self._tail + piece, 0
        self._tail = ""
        while position < len(text):
            if self._body is None:
                position = self._outside(text, position, shown)
            else:
                position = self._inside(text, position, self._body, shown)
        return "".join(shown)

    def finish(self) -> str:
        """The rest of the text, which was held back until the output ended."""
        shown: list[str] = []
        body, self._body = self._body, None
        if body is not None and (self._form.end or not self._accept("".join(body))):
            self._show(self._form.begin + "".join(body), shown)
        self._show(self._tail, shown)
        self._tail = ""
        if self._blank and not self.calls:
            shown += self._blank
        return "".join(shown)

    def _outside(self, text: str, position: int, shown: list[str]) -> int:
        """Reads on from ``position``; returns the new position."""
        mark = self._form.begin
        if not mark:
            return self._at_start(text, position, shown)
        begin = text.find(mark, position)
        if begin >= 0:
            self._show(text[position:begin], shown)
            self._body, self._body_chars = [], 0
            return begin + len(mark)
        longest = min(len(text) - position, len(mark) - 1)
        keep = next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
        self._show(text[position : len(text) - keep], shown)
        self._tail = text[len(text) - keep :]
        return len(text)

    def _at_start(self, text: str, position: int, shown: list[str]) -> int:
        """Checks the first character, for formats in which calls are the whole output."""
        rest = text[position:].lstrip() if self._may_begin else ""
        if rest.startswith("{"):
            self._may_begin, self._body, self._body_chars = False, [], 0
            return len(text) - len(rest)
        self._may_begin &= not rest
        self._show(text[position:], shown)
        return len(text)

    def _inside(self, text: str, position: int, body: list[str], shown: list[str]) -> int:
        mark = self._form.end
        end = text.find(mark, position) if mark else -1
        cut = end if end >= 0 else len(text) if not mark else max(position, len(text) - len(mark) + 1)
        body.append(text[position:cut])
        self._body_chars += cut - position
        if end < 0 and self._body_chars <= MAX_CALL_CHARS:
            self._tail = text[cut:]
            return len(text)
        self._body = None
        if end >= 0 and self._accept("".join(body)):
            return end + len(mark)
        self._show(self._form.begin + "".join(body), shown)
        return cut

    def _accept(self, body: str) -> bool:
        """Whether the text consists of calls. Calls beyond the limit are accepted and dropped."""
        found = _parse(body, self._names, self._form) if len(body) <= MAX_CALL_CHARS else None
        if not found:
            return False
        self.calls += found[: self._max_calls - len(self.calls)]
        self._blank = []
        return True

    def _show(self, text: str, shown: list[str]) -> None:
        if self._blank is not None:
            if not text or text.isspace():
                self._blank.append(text)
                return
            shown += self._blank
            self._blank = None
        shown.append(text)


def _parse(body: str, names: Set[str], form: CallFormat) -> list[ParsedToolCall] | None:
    """The calls in the text; None if any part of it is not a call."""
    calls = []
    try:
        for raw in _split(body, form):
            call = _parse_one(raw, names, form)
            if call is None:
                return None
            calls.append(call)
    except (InvalidRequestError, msgspec.DecodeError, ValueError, RecursionError):
        return None
    return calls


def _split(body: str, form: CallFormat) -> Iterator[bytes]:
    """The JSON of each call. Raises ValueError if the text has another form."""
    if form.is_list:
        yield from map(bytes, _list.decode(body))
    elif form.begin:
        yield body.encode()
    else:
        decoder, position = json.JSONDecoder(parse_int=str), 0
        while position < len(body):
            _, end = decoder.raw_decode(body, position)
            yield body[position:end].encode()
            rest = body[end:].lstrip()
            if rest and not rest.startswith(form.separator.strip()):
                raise ValueError
            rest = rest.removeprefix(form.separator.strip()).lstrip()
            position = len(body) - len(rest)


def _parse_one(raw: bytes, names: Set[str], form: CallFormat) -> ParsedToolCall | None:
    # Accepts what the grammar of forced calls accepts. The arguments are for the caller to check.
    call = parse_json(raw, of_a_model=True)
    if not isinstance(call, dict) or not set(call) <= {"name", form.arguments_key} or _repeats_a_key(raw):
        return None
    name = call.get("name")
    if not isinstance(name, str) or name not in names or not isinstance(call.get(form.arguments_key, {}), dict):
        return None
    fields = _fields.decode(raw)
    arguments = bytes(fields[form.arguments_key]).decode() if form.arguments_key in fields else "{}"
    return ParsedToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


def _repeats_a_key(raw: bytes) -> bool:
    """Whether the object itself repeats a key; nested objects do not count."""
    return len(json.loads(raw, object_pairs_hook=tuple, parse_int=str)) != len(_fields.decode(raw))
