"""Splits a model's output into reasoning, content and tool calls, however the text is cut into pieces.

A whole output is a stream of one piece, so both give the same. Text that may begin a mark is held back until that is
decided, so no part of a mark is ever shown, and no text that only looks like one is lost. White space at the start of
the content and after a call is held back too: it belongs to the format, unless other text follows.

Where arguments are JSON, a call is known once its name and the beginning of its arguments have come, and the arguments
are passed on as they come. Elsewhere it is known only at its end, and its text is held back until then.

Inside reasoning only the end of reasoning counts: what looks like a call there is the model thinking aloud.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.parsers.arguments import ArgumentReader, CallHeads
from neaptide.server.parsers.calls import CallPiece, FoundCall, NewId, Offer, ParsedToolCall, after_blank, call_id
from neaptide.server.parsers.marks import Marks, marks_of
from neaptide.server.structured.call_formats import CallFormat

MAX_CALL_CHARS = 1 << 18
"""Longest text of a call or of a list of calls; a longer one is content."""
MAX_CALLS = 128
_LOOK_CHARS = 96
"""Beginning of a section that shows whether it looks like calls."""
_HEAD_CHARS = 512
"""Beginning of a section, or of the text between two calls, in which the head of a call is looked for."""
_BEGINS_OF_CALLS = '{[<"'
"""Characters with which text after a call may go on to another one."""
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
    streams: CallHeads | None = None
    """Heads of calls whose arguments are passed on as they come; None if calls are read as a whole."""
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
    calls: Sequence[CallPiece] = ()


@dataclass(slots=True)
class _BodyText:
    """A section that has begun."""

    section: Section
    marks: Marks
    """Marks that may end it. Another begin does so too, as some models leave out the end."""
    pieces: list[str] = field(default_factory=list)
    """Text that is not decided."""
    chars: int = 0
    tries: int = 0
    arguments: ArgumentReader | None = None
    """Reader of the present call's arguments, while they come."""
    has_call: bool = False
    """Whether a call has been passed on; ``pieces`` are what follows it."""
    seeks_head: bool = True
    """Whether ``pieces`` may still be the head of a call that is passed on as it comes."""

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.chars += len(text)

    def restart(self) -> None:
        """Drops the text, which has been decided."""
        self.pieces, self.chars, self.tries, self.seeks_head = [], 0, 0, True

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
        self._heads = None if tools is None else tools.streams
        sections = () if tools is None else tools.sections
        self._sections = {section.begin: section for section in sections if not section.at_start}
        self._first_sections = {section.begin: section for section in sections if section.at_start}
        self._section_marks = {
            section.begin: marks_of(*section.ends, *(() if section.is_kept else (section.begin,)))
            for section in sections
        }
        self._begins = () if reasoning is None else reasoning.begins
        silent = (*(() if reasoning is None else reasoning.silent), *(() if tools is None else tools.silent))
        self._content_marks = marks_of(*self._begins, *self._sections, *silent)
        self._first_marks = marks_of(*self._first_sections, *self._begins, *self._sections, *silent)
        self._reasoning_marks = marks_of(*(() if reasoning is None else (*reasoning.ends, *reasoning.begins)))
        self._tail = ""
        """Text that may begin a mark."""
        self._again = ""
        """Text of earlier pieces that is read once more."""
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
        self._call_pieces: list[CallPiece] = []
        self._arguments: list[str] = []
        """Arguments so far of the call that is being passed on."""
        self._drops_call = False
        """Whether the call that is being read is beyond the limit."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that the output may contain."""
        formats = (self._reasoning, self._tools)
        return tuple(mark for form in formats if form is not None for mark in form.marks)

    def push(self, piece: str) -> Pieces:
        """Content, reasoning and calls that are decided with this piece of output."""
        self._read(self._tail + piece)
        return self._pieces()

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
            if self._again:
                text, position, self._again = self._again + text[position:], 0, ""

    def finish(self, *, is_cut: bool = False) -> Pieces:
        """The rest, which was held back until the output ended.

        Args:
            is_cut: whether a limit ended the output. A call that has begun is then returned as far as it goes.
        """
        self._is_last = True
        tail, self._tail = self._tail, ""
        if self._body is None or not is_cut:
            self._read(tail)
            tail = ""
        body, self._body = self._body, None
        # A mark that was cut off is no part of the call.
        if body is not None and body.has_call:
            self._end_calls(body, is_cut=is_cut)
        elif body is not None:
            whole = "".join(body.pieces)
            if not ((is_cut or self._looks_right(body, whole)) and self._accept(whole, is_cut=is_cut)):
                self._show(body.shown() + tail)
        if not (self.is_reasoning or self.calls or self._drops_blank):
            self._content.append(self._blank)
        self._blank = ""
        return self._pieces()

    def _pieces(self) -> Pieces:
        pieces = Pieces("".join(self._content), "".join(self._thoughts), self._call_pieces)
        self._content, self._thoughts, self._call_pieces = [], [], []
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
        if body.arguments is not None:
            return self._argue(text, position, body, body.arguments)
        if body.section.looks and body.chars < _LOOK_CHARS and not body.has_call:
            end = min(len(text), position + _LOOK_CHARS - body.chars)
            body.add(text[position:end])
            if self._begins_call(body):
                return self._reread(body, text, end)
            if body.chars == _LOOK_CHARS and not self._looks_right(body, "".join(body.pieces)):
                self._reject(body)
            return end
        limit = len(text)
        if self._seeks_head(body):  # Heads are looked for in the beginning alone.
            limit = min(limit, position + _HEAD_CHARS - body.chars + body.marks.longest_beginning)
        is_last = self._is_last and limit == len(text)
        found = body.marks.first(text, position, limit, is_last=is_last)
        if found is None:
            end = limit - body.marks.undecided(text, position, limit, is_last=is_last)
            body.add(text[position:end])
            if self._begins_call(body):
                return self._reread(body, text, end)
            if body.chars > MAX_CALL_CHARS:
                self._reject(body)
            return self._wait(text, end) if limit == len(text) else end
        body.add(text[position : found.start()])
        if self._begins_call(body):
            return self._reread(body, text, found.start())
        after = found.end() if found.group() in body.section.ends else found.start()
        if body.has_call:
            self._body = None
            self._end_calls(body)
            return after
        whole = "".join(body.pieces)
        if body.chars <= MAX_CALL_CHARS:
            if self._accept(whole):
                self._body = None
                return after
            if body.tries < _MAX_TRIES and self._tools is not None and self._tools.is_open(whole):
                body.tries += 1
                body.pieces = [whole]
                body.add(found.group())
                return found.end()
        self._reject(body)
        return found.start()

    def _looks_right(self, body: _BodyText, text: str) -> bool:
        section = body.section
        if not section.looks or not (section.at_start or self._has_content):
            return True  # The first text of the output: content would hardly begin like this.
        return re.match(section.looks, text) is not None

    def _wait(self, text: str, position: int) -> int:
        """Leaves the text from ``position`` on for the next piece."""
        self._tail = text[position:]
        return len(text)

    def _reread(self, body: _BodyText, text: str, position: int) -> int:
        """Place of the undecided text of a section, all of which has come before ``position``."""
        kept = "".join(body.pieces)
        body.restart()
        if len(kept) <= position:
            return position - len(kept)
        self._again = kept  # Part of it came in earlier pieces.
        return position

    def _reject(self, body: _BodyText) -> None:
        self._body = None
        if body.has_call:
            self._end_calls(body)
        else:
            self._show(body.shown())

    # ---- calls that are passed on as they come ----

    def _seeks_head(self, body: _BodyText) -> bool:
        return self._heads is not None and body.seeks_head and not body.tries

    def _begins_call(self, body: _BodyText) -> bool:
        """Whether the head of a call has come; the text after it is then kept in ``body``."""
        heads = self._heads
        if heads is None or not self._seeks_head(body):
            return False
        body.seeks_head = body.chars < _HEAD_CHARS
        whole = "".join(body.pieces)
        start = heads.end_of_call(whole, _HEAD_CHARS) if body.has_call else 0
        for head in heads.heads:
            found = head.match(whole, start, _HEAD_CHARS)
            name = None if found is None else self._offer.tool(found["name"])
            if found is not None and name is not None:
                body.pieces = [whole[found.end() :]]
                body.arguments, body.has_call = ArgumentReader(body.marks), True
                self._add_call(FoundCall(name, "", found.groupdict().get("id")), is_last=False)
                return True
        return False

    def _argue(self, text: str, position: int, body: _BodyText, reader: ArgumentReader) -> int:
        added, position = reader.read(text, position, is_last=self._is_last)
        self._add_arguments(added, is_last=reader.is_done)
        if not reader.is_done:
            return self._wait(text, position)
        body.arguments = None
        self._restart(drops_blank=False)
        return position

    def _end_calls(self, body: _BodyText, *, is_cut: bool = False) -> None:
        """Ends a section of which calls have been passed on."""
        if body.arguments is not None:
            self._add_arguments("", is_last=True)
            self._restart(drops_blank=False)
            return
        rest = "".join(body.pieces)
        rest = rest if self._heads is None else rest[self._heads.end_of_call(rest) :]
        # A call without a known head may follow, in a list whose beginning has been read.
        if not rest or any(self._accept(text, is_cut=is_cut) for text in (rest, "[" + rest)):
            return
        if not (is_cut and rest[0] in _BEGINS_OF_CALLS):
            self._show(rest)

    def _add_arguments(self, added: str, *, is_last: bool) -> None:
        if self._drops_call:
            return
        self._arguments.append(added)
        index, call = len(self.calls) - 1, self.calls[-1]
        if is_last:
            self.calls[-1] = replace(call, arguments="".join(self._arguments))
            self._arguments = []
        if self._call_pieces and self._call_pieces[-1].index == index:
            piece = self._call_pieces[-1]
            self._call_pieces[-1] = replace(piece, arguments=piece.arguments + added, is_last=is_last)
        elif added or is_last:
            self._call_pieces.append(CallPiece(index, call.id, call.name, added, is_first=False, is_last=is_last))

    def _accept(self, text: str, *, is_cut: bool = False) -> bool:
        """Whether the text consists of calls. Calls beyond the limit are accepted and dropped."""
        if self._tools is None or len(text) > MAX_CALL_CHARS:
            return False
        try:
            found = self._tools.parse(text, self._offer, is_cut)
        except (ValueError, InvalidRequestError, RecursionError):
            return False
        known = [call._replace(name=name) for call in found if (name := self._offer.tool(call.name)) is not None]
        if not known or len(known) < len(found):
            return False
        for call in known:
            self._add_call(call)
        self._restart(drops_blank=False)
        return True

    def _add_call(self, found: FoundCall, *, is_last: bool = True) -> None:
        self._drops_call = self._tools is None or len(self.calls) == self._max_calls
        if self._tools is None or self._drops_call:
            return
        is_new = found.id is not None and all(found.id != one.id for one in self.calls)
        call_id = found.id if found.id is not None and is_new else self._tools.new_id()
        piece = CallPiece(len(self.calls), call_id, found.name, found.arguments, is_last=is_last)
        self._call_pieces.append(piece)
        self.calls.append(ParsedToolCall(call_id, found.name, found.arguments))

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
