"""Splits a model's output into reasoning, content and tool calls, however the text is cut into pieces.

A whole output is a stream of one piece, so both give the same. Text that may begin a mark is held back until that is
decided, so no part of a mark is ever shown, and no text that only looks like one is lost. A call is known only at its
end, so its text is held back until then. White space at the start of the content and after a call is held back too: it
belongs to the format, unless other text follows.

Inside reasoning only the end of reasoning counts: what looks like a call there is the model thinking aloud.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.parsers.calls import FoundCall, NewId, Offer, ParsedToolCall, after_blank, call_id
from neaptide.server.structured.call_formats import CallFormat

MAX_CALL_CHARS = 1 << 18
"""Longest text of a call or of a list of calls; a longer one is content."""
MAX_CALLS = 128
_LOOK_CHARS = 96
"""Beginning of a section that shows whether it looks like calls."""
_MAX_TRIES = 8
"""Ends that are tried for one call: text inside a call may spell the mark that ends it."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the output that holds calls, between two marks."""

    begin: str
    ends: tuple[str, ...] = ()
    """Marks that end it; without one only the end of the output does."""
    at_start: bool = False
    """Whether ``begin`` counts only as the first text of the content."""
    is_kept: bool = False
    """Whether ``begin`` belongs to the calls' own text."""
    looks: str = ""
    """Expression that calls begin with, where ``begin`` alone may begin content too. Such content is then not held
    back."""


Parse = Callable[[str, Offer, bool], list[FoundCall]]
"""Parses a section's text. With the flag set, the output was cut: the last call may then be incomplete.

Raises NoCallError.
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model family writes tool calls."""

    name: str
    sections: tuple[Section, ...]
    parse: Parse
    is_open: Callable[[str], bool] = lambda body: False
    """Whether a section's text goes on although a mark that ends it has come, as inside a string."""
    inner_marks: tuple[str, ...] = ()
    """Further marks inside a section, which may be special tokens."""
    silent: tuple[str, ...] = ()
    """Marks that are dropped from the content."""
    grammar: CallFormat | None = None
    """The format for grammars; None if calls that are forced are written as plain JSON."""
    needs_types: bool = False
    """Whether values are written without quotes, so that only the schema tells numbers from texts."""
    new_id: NewId = call_id

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format."""
        ends = (end for section in self.sections for end in section.ends)
        return (*(section.begin for section in self.sections), *ends, *self.inner_marks, *self.silent)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model family marks its reasoning."""

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    is_implied: bool = False
    """Whether an output begins inside reasoning unless the prompt has ended it."""
    at_start: bool = False
    """Whether reasoning is only the first part of an output."""
    silent: tuple[str, ...] = ()
    """Marks that are dropped from the content."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format."""
        return (*self.begins, *self.ends, *self.silent)

    def is_open_after(self, prompt: str) -> bool:
        """Whether an output begins inside reasoning, because the end of the prompt's text opens it."""
        end = prompt.rstrip()
        if end.endswith(self.begins):
            return True
        return self.is_implied and not end.endswith(self.ends)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether the end of the prompt's text closes reasoning, so that the model is not to think."""
        return prompt.rstrip().endswith(self.ends)


class Pieces(NamedTuple):
    """Additions by one piece of output."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[ParsedToolCall] = ()


class Marks:
    """Finds the first of several marks in text that is cut into pieces."""

    def __init__(self, marks: Sequence[str]) -> None:
        longest_first = sorted(set(marks), key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = {mark[:n] for mark in longest_first for n in range(1, len(mark))}
        self._longest = max(map(len, longest_first), default=1) - 1

    def first(self, text: str, position: int, *, is_last: bool) -> re.Match[str] | None:
        """The first mark from ``position`` on. At the end of the text a longer one may be meant, unless it is the last
        piece."""
        found = None if self._pattern is None else self._pattern.search(text, position)
        if found is None or is_last or len(text) - found.start() > self._longest:
            return found
        return None if text[found.start() :] in self._beginnings else found

    def at(self, text: str, position: int) -> str:
        """The mark at ``position``; empty if there is none."""
        found = None if self._pattern is None else self._pattern.match(text, position)
        return "" if found is None else found.group()

    def may_begin(self, text: str, position: int) -> bool:
        """Whether the text from ``position`` on is the beginning of a mark."""
        return len(text) - position <= self._longest and text[position:] in self._beginnings

    def undecided(self, text: str, position: int, *, is_last: bool) -> int:
        """Length of the longest end of the text that begins a mark."""
        if is_last:
            return 0
        for length in range(min(len(text) - position, self._longest), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


@lru_cache(256)
def _marks_of(*marks: str) -> Marks:
    """The same object for the same marks, which every request to a model has."""
    return Marks(marks)


@dataclass(slots=True)
class _BodyText:
    """A section that has begun."""

    section: Section
    marks: Marks
    """Marks that may end it. Another begin does so too, as some models leave out the end."""
    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    tries: int = 0

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.chars += len(text)

    def shown(self) -> str:
        """The section as content."""
        begin = "" if self.section.is_kept else self.section.begin
        return begin + "".join(self.pieces)


class OutputParser:
    """State machine over the text of one output.

    Args:
        tools: format of calls; None if no tools are offered.
        is_reasoning: whether the output begins inside reasoning.
        max_calls: further calls are dropped.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        offer: Offer,
        *,
        is_reasoning: bool = False,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self.calls: list[ParsedToolCall] = []
        self.is_reasoning = is_reasoning
        """Whether the text that has come so far ends inside reasoning."""
        self._reasoning, self._tools, self._offer, self._max_calls = reasoning, tools, offer, max_calls
        sections = () if tools is None else tools.sections
        self._sections = {section.begin: section for section in sections if not section.at_start}
        self._first_sections = {section.begin: section for section in sections if section.at_start}
        self._section_marks = {
            section.begin: _marks_of(*section.ends, *(() if section.is_kept else (section.begin,)))
            for section in sections
        }
        self._begins = () if reasoning is None else reasoning.begins
        silent = (*(() if reasoning is None else reasoning.silent), *(() if tools is None else tools.silent))
        self._content_marks = _marks_of(*self._begins, *self._sections, *silent)
        self._first_marks = _marks_of(*self._first_sections, *self._begins, *self._sections, *silent)
        self._reasoning_marks = _marks_of(*(() if reasoning is None else (*reasoning.ends, *reasoning.begins)))
        self._tail = ""
        """Text that may begin a mark."""
        self._is_last = False
        self._body: _BodyText | None = None
        self._blank = ""
        """White space that is held back."""
        self._is_blank = True
        """Whether nothing but white space has come since the output, or the reasoning in it, began, or since a call or
        reasoning ended."""
        self._drops_blank = is_reasoning
        """Whether white space before other text is dropped, as it is around reasoning."""
        self._has_content = self._has_thoughts = False
        self._content: list[str] = []
        self._thoughts: list[str] = []

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that the output may contain."""
        formats = (self._reasoning, self._tools)
        return tuple(mark for form in formats if form is not None for mark in form.marks)

    def push(self, piece: str) -> Pieces:
        """Content, reasoning and calls that are decided with this piece of output."""
        known = len(self.calls)
        self._read(self._tail + piece)
        return self._pieces(known)

    def _read(self, text: str) -> None:
        position = 0
        self._tail = ""
        while position < len(text):
            if self._body is not None:
                position = self._inside(text, position, self._body)
            elif self.is_reasoning:
                position = self._think(text, position)
            else:
                position = self._outside(text, position)

    def finish(self, *, is_cut: bool = False) -> Pieces:
        """The rest, which was held back until the output ended.

        Args:
            is_cut: whether a limit ended the output. A call that has begun is then returned as far as it goes.
        """
        known = len(self.calls)
        self._is_last = True
        tail, self._tail = self._tail, ""
        if self._body is None or not is_cut:
            self._read(tail)
            tail = ""
        body, self._body = self._body, None
        # A mark that was cut off is no part of the call.
        if body is not None and not self._accept("".join(body.pieces), is_cut=is_cut):
            self._show(body.shown() + tail)
        if not (self.is_reasoning or self.calls or self._drops_blank):
            self._content.append(self._blank)
        self._blank = ""
        return self._pieces(known)

    def _pieces(self, known: int) -> Pieces:
        pieces = Pieces("".join(self._content), "".join(self._thoughts), self.calls[known:])
        self._content, self._thoughts = [], []
        return pieces

    # ---- states: each reads on from a position and returns the new one ----

    def _think(self, text: str, position: int) -> int:
        found = self._reasoning_marks.first(text, position, is_last=self._is_last)
        if found is None:
            keep = self._reasoning_marks.undecided(text, position, is_last=self._is_last)
            self._show_thought(text[position : len(text) - keep])
            self._tail = text[len(text) - keep :]
            return len(text)
        self._show_thought(text[position : found.start()])
        if found.group() not in self._begins:
            self.is_reasoning = False
            self._restart(drops_blank=True)
        elif not self._is_blank:  # A begin that repeats the prompt's is dropped.
            self._show_thought(found.group())
        return found.end()

    def _outside(self, text: str, position: int) -> int:
        if self._is_blank and self._first_sections:
            start = after_blank(text, position)
            if not self._is_last and self._first_marks.may_begin(text, start):
                self._tail = text[position:]
                return len(text)
            mark = self._first_marks.at(text, start)
            if mark in self._first_sections:
                self._show(text[position:start])
                return self._open(self._first_sections[mark], start)
        found = self._content_marks.first(text, position, is_last=self._is_last)
        if found is None:
            keep = self._content_marks.undecided(text, position, is_last=self._is_last)
            self._show(text[position : len(text) - keep])
            self._tail = text[len(text) - keep :]
            return len(text)
        self._show(text[position : found.start()])
        mark = found.group()
        if mark in self._sections:
            return self._open(self._sections[mark], found.start())
        if mark in self._begins:
            if self._reasoning is not None and self._reasoning.at_start and (self._has_content or self._has_thoughts):
                self._show(mark)
                return found.end()
            self.is_reasoning = True
            self._restart(drops_blank=True)
        return found.end()

    def _open(self, section: Section, start: int) -> int:
        self._body = _BodyText(section, self._section_marks[section.begin])
        return start if section.is_kept else start + len(section.begin)

    def _inside(self, text: str, position: int, body: _BodyText) -> int:
        if body.section.looks and body.chars < _LOOK_CHARS:
            end = min(len(text), position + _LOOK_CHARS - body.chars)
            body.add(text[position:end])
            if body.chars == _LOOK_CHARS and re.match(body.section.looks, "".join(body.pieces)) is None:
                self._reject(body)
            return end
        found = body.marks.first(text, position, is_last=self._is_last)
        if found is None:
            keep = body.marks.undecided(text, position, is_last=self._is_last)
            body.add(text[position : len(text) - keep])
            self._tail = text[len(text) - keep :]
            if body.chars > MAX_CALL_CHARS:
                self._reject(body)
            return len(text)
        body.add(text[position : found.start()])
        whole, mark = "".join(body.pieces), found.group()
        is_end = mark in body.section.ends
        if body.chars <= MAX_CALL_CHARS:
            if self._accept(whole):
                self._body = None
                return found.end() if is_end else found.start()
            if body.tries < _MAX_TRIES and self._tools is not None and self._tools.is_open(whole):
                body.tries += 1
                body.pieces = [whole]
                body.add(mark)
                return found.end()
        self._reject(body)
        return found.start()

    def _reject(self, body: _BodyText) -> None:
        self._body = None
        self._show(body.shown())

    def _accept(self, text: str, *, is_cut: bool = False) -> bool:
        """Whether the text consists of calls. Calls beyond the limit are accepted and dropped."""
        if self._tools is None or len(text) > MAX_CALL_CHARS:
            return False
        try:
            found = self._tools.parse(text, self._offer, is_cut)
        except (ValueError, InvalidRequestError, RecursionError):
            return False
        if not found or not all(call.name in self._offer.names for call in found):
            return False
        for call in found[: self._max_calls - len(self.calls)]:
            is_new = call.id is not None and all(call.id != one.id for one in self.calls)
            call_id = call.id if call.id is not None and is_new else self._tools.new_id()
            self.calls.append(ParsedToolCall(call_id, call.name, call.arguments))
        self._restart(drops_blank=False)
        return True

    # ---- what is shown ----

    def _restart(self, *, drops_blank: bool) -> None:
        self._blank, self._is_blank, self._drops_blank = "", True, drops_blank

    def _show(self, text: str) -> None:
        if self._is_blank:
            if not text or text.isspace():
                self._blank += text
                return
            text = text.lstrip() if self._drops_blank else self._blank + text
            self._blank, self._is_blank = "", False
        self._has_content = True
        self._content.append(text)

    def _show_thought(self, text: str) -> None:
        """Shows reasoning without the white space around it."""
        text = self._blank + text
        if self._is_blank:
            text = text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._is_blank, self._has_thoughts = False, True
            self._thoughts.append(shown)
