"""Finds the marks of formats in text that is cut into pieces."""

import re
from collections.abc import Sequence
from functools import lru_cache


class Marks:
    """Finds the first of several marks in text that is cut into pieces."""

    def __init__(self, marks: Sequence[str]) -> None:
        longest_first = sorted(set(marks), key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = {mark[:n] for mark in longest_first for n in range(1, len(mark))}
        self.longest_beginning = max(map(len, longest_first), default=1) - 1

    def first(self, text: str, position: int, end: int | None = None, *, is_last: bool) -> re.Match[str] | None:
        """The first mark between two places. At the end of the text a longer one may be meant, unless it is the last
        piece."""
        end = len(text) if end is None else end
        found = None if self._pattern is None else self._pattern.search(text, position, end)
        if found is None or is_last or end - found.start() > self.longest_beginning:
            return found
        return None if text[found.start() : end] in self._beginnings else found

    def at(self, text: str, position: int) -> str:
        """The mark at ``position``; empty if there is none."""
        found = None if self._pattern is None else self._pattern.match(text, position)
        return "" if found is None else found.group()

    def may_begin(self, text: str, position: int) -> bool:
        """Whether the text from ``position`` on is the beginning of a mark."""
        return len(text) - position <= self.longest_beginning and text[position:] in self._beginnings

    def undecided(self, text: str, position: int, end: int | None = None, *, is_last: bool) -> int:
        """Length of the longest end of the text that begins a mark."""
        if is_last:
            return 0
        end = len(text) if end is None else end
        for length in range(min(end - position, self.longest_beginning), 0, -1):
            if text[end - length : end] in self._beginnings:
                return length
        return 0


@lru_cache(256)
def marks_of(*marks: str) -> Marks:
    """The same object for the same marks, which every request to a model has."""
    return Marks(marks)
