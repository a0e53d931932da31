"""The piece cache gives the tokenizer's own ids, or leaves the text to it."""

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from neaptide.server.text.piece_cache import MAX_TEXT_CHARS, PieceCache
from tests.server.conftest import MODEL_DIR

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = ["the", " a", "It's", "we'LL", "  ", "\n\n", " \n ", "\t", "\r\n", "12345", "...", "x=1", "<|", "\\"]


def spec(pattern: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    if pattern is not None:
        found["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    return found


def texts(added: list[str]) -> list[str]:
    rng = random.Random(5)
    words = WORDS + added
    return ["".join(rng.choices(words, k=rng.randrange(40))) for _ in range(300)] + [
        "".join(chr(rng.choice([9, 10, 13, *range(32, 127)])) for _ in range(200)) for _ in range(100)
    ]


@pytest.mark.parametrize("pattern", [None, LLAMA_3])
def test_ids_are_the_tokenizers_own(pattern: str | None) -> None:
    known = spec(pattern)
    fast = FastTokenizer.from_str(json.dumps(known))
    cache = PieceCache.create(fast, known)
    assert cache is not None
    for text in texts([token["content"] for token in known["added_tokens"]]):
        assert cache.encode(text) == fast.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("text", ["\u00e9", "a\x00b", "a\x1cb", "\x7f", "a" * (MAX_TEXT_CHARS + 1)])
def test_other_text_is_left_to_the_tokenizer(text: str) -> None:
    known = spec()
    cache = PieceCache.create(FastTokenizer.from_str(json.dumps(known)), known)
    assert cache is not None
    assert cache.encode(text) is None


def changed(path: list[str | int], value: object) -> dict[str, Any]:
    known: Any = spec()
    place = known
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return dict(known)


@pytest.mark.parametrize(
    "known",
    [
        changed(["normalizer"], {"type": "NFC"}),
        changed(["pre_tokenizer"], None),
        changed(["pre_tokenizer"], {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}),
        changed(["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed"),
        changed(["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], r"^\p{L}+|\s+"),
        changed(["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], r"\p{Lu}+|\s+"),
        changed(["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], r"(a|b)+|\s+"),
        changed(["model", "dropout"], 0.1),
        changed(["added_tokens", 0, "lstrip"], True),
    ],
)
def test_tokenizers_of_another_shape_are_left_alone(known: dict[str, Any]) -> None:
    fast = FastTokenizer.from_str(json.dumps(spec()))
    assert PieceCache.create(fast, known) is None
