"""Translates regular expressions of JSON Schema to the compiler's dialect.

ECMAScript's classes differ from other dialects: ``\\s`` includes the byte order mark and not U+0085, and ``.`` excludes
all line ends.
"""

import re

_ENDS_OF_LINES = "\n\r\u2028\u2029"
_SPACES = f"\t\v\f \u00a0\u1680\u2000-\u200a\u202f\u205f\u3000\ufeff{_ENDS_OF_LINES}"
_RUN = re.compile(r"(\[(?:[^\[\]\\]|\\.)+\]|\w|\\[dDwWsS])\{(\d+),\d*\}")
_PIECE = re.compile(r"\\.|[\[\].]", re.DOTALL)


def in_our_dialect(pattern: str) -> str:
    """The same expression for the compiler, for which long repeat counts are expensive."""
    is_in_class = False
    if run := _RUN.fullmatch(pattern):  # Matches anywhere, so that the longest run does not matter.
        pattern = f"{run[1]}{{{run[2]}}}"

    def written(found: re.Match[str]) -> str:
        nonlocal is_in_class
        piece = found.group()
        match piece:
            case "[" | "]":
                is_in_class = piece == "["
            case r"\s":
                return f"[{_SPACES}]"
            case r"\S":
                return f"[^{_SPACES}]"
            case "." if not is_in_class:
                return f"[^{_ENDS_OF_LINES}]"
        return piece

    return _PIECE.sub(written, pattern)
