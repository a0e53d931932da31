"""Streams the arguments of a call while the model writes them, for formats whose arguments are a JSON object.

Once the function's name and the beginning of the object have come, the text is a call whatever follows. The arguments
are the model's text. Only what JSON forbids and models write all the same is written anew: line ends inside strings,
escapes and words of Python, single quotes, a comma before the end.
"""

import re
import sys
from dataclasses import dataclass

from neaptide.server.http.jsonbody import MAX_DEPTH
from neaptide.server.parsers.marks import Marks

_OBJECT_FOLLOWS = r"""(?=\{\s*["}])"""
_KEPT = re.compile(r"[\s\d:.+-]+")
_WORD = re.compile(r"[A-Za-z]+")
_BLANK = re.compile(r"\s+")
_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LONGEST_WORD = max(map(len, _WORDS))
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_ESCAPED = '"\\/bfnrtu'
"""Characters that JSON allows after a backslash."""


@dataclass(frozen=True, slots=True)
class CallHeads:
    """What stands around the arguments of a call."""

    heads: tuple[re.Pattern[str], ...]
    """Text before the arguments, as alternatives. Groups are ``name``, and ``id`` in formats with ids."""
    after: re.Pattern[str]
    """Text after the arguments, up to the next call or the end of the section. It matches the empty text."""

    def end_of_call(self, text: str, limit: int = sys.maxsize) -> int:
        """Place at which what follows a call's arguments ends."""
        found = self.after.match(text, 0, limit)
        return 0 if found is None else found.end()


def call_heads(*heads: str, after: str = "") -> CallHeads:
    """The calls' surroundings, as expressions."""
    return CallHeads(
        tuple(re.compile(head + _OBJECT_FOLLOWS) for head in heads), re.compile(rf"(?:{after})?\s*[;,]?\s*")
    )


class ArgumentReader:
    """Reads one JSON object that is cut into pieces, and finds its end.

    It follows strings and brackets and validates nothing else.

    Args:
        marks: outside strings, they end the object.
    """

    def __init__(self, marks: Marks) -> None:
        self.is_done = False
        """Whether the object has ended, or the text that can belong to it."""
        self._marks = marks
        self._depth = 0
        self._quote = ""
        """The quote that began the present string; empty outside strings."""
        self._is_in_word = False
        self._comma: list[str] = []
        """A comma and the white space after it, until it is known whether the object goes on."""
        self._out: list[str] = []

    def read(self, text: str, position: int, *, is_last: bool) -> tuple[str, int]:
        """Additional arguments, and the place up to which the text was read; the rest waits for more text."""
        while position < len(text) and not self.is_done:
            step = self._inside(text, position) if self._quote else self._outside(text, position, is_last)
            if step == position:
                break
            position = step
        return self._taken(), position

    def _taken(self) -> str:
        taken, self._out = "".join(self._out), []
        return taken

    def _inside(self, text: str, position: int) -> int:
        if plain := _PLAIN.match(text, position):
            self._out.append(plain.group())
            return plain.end()
        character = text[position]
        if character == "\\":
            return self._escape(text, position)
        if character == self._quote:
            self._quote, character = "", '"'
        elif character == '"':
            character = '\\"'
        elif character < " ":
            character = _ESCAPES.get(character) or f"\\u{ord(character):04x}"
        self._out.append(character)
        return position + 1

    def _escape(self, text: str, position: int) -> int:
        escaped = text[position + 1 : position + 2]
        if not escaped:
            return position
        if escaped in _ESCAPED:
            self._out.append("\\" + escaped)
        elif escaped < " ":
            self._out.append(_ESCAPES.get(escaped) or f"\\u{ord(escaped):04x}")
        else:
            self._out.append(escaped if escaped == "'" else "\\\\" + escaped)
        return position + 2

    def _outside(self, text: str, position: int, is_last: bool) -> int:
        if not self._is_in_word:
            if not is_last and self._marks.may_begin(text, position):
                return position
            if self._marks.at(text, position):
                self.is_done = True
                return position
        if self._comma and (blank := _BLANK.match(text, position)):
            self._comma.append(blank.group())
            return blank.end()
        if word := _WORD.match(text, position):
            return self._word(word, is_whole=is_last or word.end() < len(text))
        if self._is_in_word:
            self._is_in_word = False
            return self._outside(text, position, is_last)
        if kept := _KEPT.match(text, position):
            self._release_comma()
            self._out.append(kept.group())
            return kept.end()
        return self._sign(text[position], position)

    def _word(self, word: re.Match[str], *, is_whole: bool) -> int:
        if not is_whole and len(word.group()) <= _LONGEST_WORD and not self._is_in_word:
            return word.start()
        self._release_comma()
        self._out.append(word.group() if self._is_in_word else _WORDS.get(word.group(), word.group()))
        self._is_in_word = not is_whole
        return word.end()

    def _sign(self, sign: str, position: int) -> int:
        if sign in "{[":
            if self._depth == MAX_DEPTH:
                self.is_done = True
                return position
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            del self._comma[:1]
        self._release_comma()
        if sign == ",":
            self._comma.append(sign)
            return position + 1
        if sign in "\"'":
            self._quote, sign = sign, '"'
        self._out.append(sign)
        self.is_done = not self._depth
        return position + 1

    def _release_comma(self) -> None:
        self._out += self._comma
        self._comma.clear()
