"""Cached tokenization: the pieces of a text mostly repeat, and so do their tokens.

For byte-level BPE tokenizers of the usual shape (one regular expression splits the text, and BPE handles each piece
alone) and plain ASCII text, it gives the tokenizer's ids in a tenth of the time. The tokenizer handles everything
else.
"""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

MAX_TEXT_CHARS = 1 << 15
"""Longest text that is handled here. The tokenizer lets other threads run, which longer texts need."""
_MAX_PIECES = 1 << 16
_MAX_PIECE_CHARS = 64
_PLAIN_TEXT = re.compile(r"[\t\n\r -~]*")
_ASCII_CLASSES = {"L": "a-zA-Z", "N": "0-9"}
_STAND_INS = str.maketrans({"\t": "\u0109", "\n": "\u010a", "\r": "\u010d", " ": "\u0120"})
"""Characters that byte-level BPE writes for unprintable bytes."""


class PieceCache:
    """Token ids of plain texts. Thread-safe. ``create`` checks whether a tokenizer has the right shape."""

    def __init__(self, fast: FastTokenizer, cut: re.Pattern[str], added: Mapping[str, int]) -> None:
        self._pieces = _Pieces(fast)
        self._cut = cut
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._at_added = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None

    @classmethod
    def create(cls, fast: FastTokenizer, spec: Mapping[str, Any]) -> "PieceCache | None":
        """The cache, or None for a tokenizer of another shape."""
        added = spec.get("added_tokens", [])
        simple = not any(token[name] for token in added for name in ("lstrip", "rstrip", "single_word"))
        cut = _cut_pattern(spec.get("pre_tokenizer"))
        if cut is None or not simple or spec.get("normalizer") or len({t["normalized"] for t in added}) > 1:
            return None
        model = spec["model"]
        odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token")
        if model.get("type") != "BPE" or any(model.get(name) for name in odd):
            return None
        return cls(fast, cut, {t["content"]: t["id"] for t in added})

    def encode(self, text: str) -> list[int] | None:
        """Token ids without a post-processor's additions; None if the tokenizer must do it."""
        if len(text) > MAX_TEXT_CHARS or not text.isascii() or not _PLAIN_TEXT.fullmatch(text):
            return None
        if self._at_added is None:
            return self._encode_part(text)
        ids: list[int] = []
        for index, part in enumerate(self._at_added.split(text)):
            if index % 2:
                ids.append(self._added[part])
            elif (encoded := self._encode_part(part)) is None:
                return None
            else:
                ids += encoded
        return ids

    def _encode_part(self, text: str) -> list[int] | None:
        pieces = self._cut.findall(text)
        if sum(map(len, pieces)) != len(text):
            return None
        return list(chain.from_iterable(map(self._pieces.__getitem__, pieces)))


class _Pieces(dict[str, tuple[int, ...]]):
    """Ids of each piece seen so far; cleared when it is full."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._model = fast.model

    def __missing__(self, piece: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize(piece.translate(_STAND_INS)))
        if len(piece) <= _MAX_PIECE_CHARS:
            if len(self) >= _MAX_PIECES:
                self.clear()
            self[piece] = ids
        return ids


def _cut_pattern(pre_tokenizer: Any) -> re.Pattern[str] | None:
    """The expression that splits a text into pieces, for ASCII; None if that is unknown."""
    parts = pre_tokenizer.get("pretokenizers", []) if isinstance(pre_tokenizer, Mapping) else []
    if [part.get("type") for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = parts
    if byte_level.get("add_prefix_space") or byte_level.get("use_regex", True):
        return None
    if split.get("behavior") != "Isolated" or split.get("invert") or "Regex" not in split.get("pattern", {}):
        return None
    return _ascii_pattern(split["pattern"]["Regex"])


def _ascii_pattern(source: str) -> re.Pattern[str] | None:
    """An Oniguruma expression in Python's dialect; None if they might differ on ASCII text."""
    if re.search(r"\[:|&&|\$|(?<!\[)\^|(?<![LN])\}\+|\\P|\\p\{(?![LN]\})|\\[^psSrn]", source):
        return None
    in_class = False
    parts = []
    for part in re.findall(r"\\p\{[LN]\}|\\.|.", source, re.DOTALL):
        if part.startswith("\\p"):
            chars = _ASCII_CLASSES[part[3]]
            parts.append(chars if in_class else f"[{chars}]")
            continue
        in_class = part == "[" or (in_class and part != "]")
        parts.append(part)
    try:
        pattern = re.compile("".join(parts), re.ASCII)
    except re.error:
        return None
    return pattern if pattern.groups == 0 else None
