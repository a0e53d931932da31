"""Tool calls in a model's output: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as in Hermes.

The output is not to be trusted. The parser reads each character a fixed number of times, holds back a bounded
part, and evaluates nothing. What is not exactly a call of a tool that the caller offered stays text.
"""

import json
import secrets
from collections.abc import Set
from dataclasses import dataclass

from neaptide.server.edge.errors import InvalidRequestError
from neaptide.server.edge.jsonbody import parse_object
from neaptide.server.openai import replies

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARS = 1 << 16
MAX_CALLS = 128


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function of the caller."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def as_message_part(self) -> replies.ToolCall:
        """An entry of a message's ``tool_calls``."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits output text into what is shown and what is called, however the text was cut into pieces.

    A call is known only when its end has come, so its text is held back until then. So is white space at the
    start and after a call: it belongs to the notation, unless other text follows it.
    """

    def __init__(self, names: Set[str], *, max_calls: int = MAX_CALLS) -> None:
        self.calls: list[ToolCall] = []
        self._names = names
        self._max_calls = max_calls
        self._tail = ""  # outside a call what may begin OPEN, inside what may begin CLOSE
        self._body: list[str] | None = None  # inside a call its text up to the tail
        self._body_chars = 0
        self._blank: list[str] | None = []  # white space held back; None while text is being shown

    def push(self, piece: str) -> str:
        """The text that may be shown now. New calls stand at the end of ``calls``."""
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
        """What was held back and is text after all, because the output ended."""
        shown: list[str] = []
        if self._body is not None:
            self._show(OPEN + "".join(self._body), shown)
            self._body = None
        self._show(self._tail, shown)
        self._tail = ""
        if self._blank and not self.calls:
            shown += self._blank
        return "".join(shown)

    def _outside(self, text: str, position: int, shown: list[str]) -> int:
        """Reads on from ``position``; returns how far."""
        begin = text.find(OPEN, position)
        if begin >= 0:
            self._show(text[position:begin], shown)
            self._body, self._body_chars = [], 0
            return begin + len(OPEN)
        longest = min(len(text) - position, len(OPEN) - 1)
        keep = next((n for n in range(longest, 0, -1) if text.endswith(OPEN[:n])), 0)
        self._show(text[position : len(text) - keep], shown)
        self._tail = text[len(text) - keep :]
        return len(text)

    def _inside(self, text: str, position: int, body: list[str], shown: list[str]) -> int:
        end = text.find(CLOSE, position)
        cut = end if end >= 0 else max(position, len(text) - len(CLOSE) + 1)
        body.append(text[position:cut])
        self._body_chars += cut - position
        if end < 0 and self._body_chars <= MAX_CALL_CHARS:
            self._tail = text[cut:]
            return len(text)
        self._body = None
        if end >= 0 and self._accept("".join(body)):
            return end + len(CLOSE)
        self._show(OPEN + "".join(body), shown)
        return cut

    def _accept(self, body: str) -> bool:
        """Whether the text is a call. One beyond the limit is one, too, but is left out."""
        call = _parse(body, self._names) if len(body) <= MAX_CALL_CHARS else None
        if call is None:
            return False
        if len(self.calls) < self._max_calls:
            self.calls.append(call)
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


def _parse(body: str, names: Set[str]) -> ToolCall | None:
    try:
        call = parse_object(body.encode())
    except InvalidRequestError:
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not set(call) <= {"name", "arguments"} or not isinstance(name, str) or name not in names:
        return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False))
