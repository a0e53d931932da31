"""Converts output tokens to text, one token at a time: whole characters only, and nothing past a stop string."""

import codecs
from collections.abc import Collection, Sequence

from neaptide.server.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes the bytes of tokens to whole characters; an unfinished UTF-8 sequence waits for its rest."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown_ids: Collection[int] = ()
    ) -> None:
        """Makes a decoder. ``shown_ids`` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._shown_ids = shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._skip and token_id not in self._shown_ids and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest at the end of the output: a replacement character if a sequence is unfinished."""
        return self._utf8.decode(b"", final=True)


class StopScanner:
    """Finds the stop string that is complete first, however the text is split into pieces.

    Text that may begin a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that may be shown now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = self._first_complete(text)
        if found is not None:
            begin, self.matched = found
            self._held = ""
            return text[: begin + len(self.matched)] if self._include_stop else text[:begin]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def release(self) -> str:
        """Returns the text that was held back, as the output ends."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """The match with the earliest end; among those the longest."""
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if not found:
            return None
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]))

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
