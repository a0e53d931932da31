"""Tokens that only a chat template may write, such as the marks of roles and turns.

A user can type the text of such a token. In a conversation only the template may make it: otherwise users could end
their own turn and speak as the system. Whether the tokenizer calls a token special says little: some distilled models
have role marks that are not.

So in everything that the caller sends, the punctuation of such tokens is replaced by stand-ins, and the template is
rendered. No replacing, joining or cutting in the template can make a token of them. What then reads as a
control token is the template's own. If the text reads the same after the stand-ins are reverted, it is encoded as it
is. Otherwise the template's tokens are written as aliases that no caller can guess, and only aliases count.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as FastTokenizer

_MARK = re.compile(r"<.+>|\[.+\]|\{.+\}|\|.+\|", re.DOTALL)
"""Form of added tokens that are marks and not words."""
_TAG = re.compile(r"</?[A-Za-z_][A-Za-z0-9_:.-]*>")
"""Tags in a model's own turns, such as those of thoughts and calls, which templates look for."""
_STAND_INS = range(0x100000, 0x10FFFE)
"""Private code points, which no text has by accident."""


class Disguise:
    """The stand-ins of one conversation."""

    def __init__(self, guarded: str) -> None:
        first = secrets.choice(range(_STAND_INS.start, _STAND_INS.stop - len(guarded)))
        self._originals = {first + index: char for index, char in enumerate(guarded)}
        self.table = {ord(char): chr(stand_in) for stand_in, char in self._originals.items()}
        self.is_used = False

    def reveal(self, text: str, behind: str = "") -> str:
        """The text with the callers' characters, each followed by ``behind``."""
        if not self.is_used:
            return text
        if "\\ud" in text:  # Templates may write JSON in ASCII.
            escaped = {json.dumps(chr(code))[1:-1]: char + behind for code, char in self._originals.items()}
            text = re.sub("|".join(map(re.escape, escaped)), lambda match: escaped[match.group()], text)
        return text.translate({code: char + behind for code, char in self._originals.items()})


class ControlTokens:
    """The control tokens of one tokenizer.

    Args:
        fast: the tokenizer.
        spec: its description, ``tokenizer.json``.
        literals: all text that the model's chat templates write.
        named: contents of the tokens that the tokenizer's configuration names.
    """

    def __init__(self, fast: FastTokenizer, spec: Mapping[str, Any], literals: str, named: frozenset[str]) -> None:
        added: dict[str, dict[str, Any]] = {token["content"]: token for token in spec["added_tokens"]}
        self._tokens = {text: token for text, token in added.items() if _is_control(token, literals, named)}
        self._fast = fast
        self._ids = frozenset(token["id"] for token in self._tokens.values())
        self._is_normalized = spec.get("normalizer") is not None and any(
            token["normalized"] for token in self._tokens.values()
        )
        self._own_tags = frozenset(
            text
            for text, token in self._tokens.items()
            if not token["special"] and text not in named and _partner(text) in added
        )
        self._pattern = _any_of(self._tokens)
        self._guarded = "".join(sorted(set().union(*map(_guarded_chars, self._tokens))))
        self._suspicious = re.compile(f"[{re.escape(self._guarded)}]") if self._guarded else None
        self._aliased: _Aliased | None = None

    def disguise(self) -> Disguise:
        return Disguise(self._guarded)

    def hide_messages(self, messages: Sequence[Mapping[str, Any]], disguise: Disguise) -> list[Any]:
        """The messages with stand-ins. Tags in the model's own turns stay, because templates look for them."""
        return [self._hidden(message, disguise, message.get("role") == "assistant") for message in messages]

    def hide(self, value: Any, disguise: Disguise) -> Any:
        """Any other value from the caller with stand-ins."""
        return self._hidden(value, disguise, False)

    def _hidden(self, value: Any, disguise: Disguise, is_models: bool) -> Any:
        if isinstance(value, str):
            if self._suspicious is None or not self._suspicious.search(value):
                return value
            disguise.is_used = True
            return self._with_tags(value, disguise) if is_models else value.translate(disguise.table)
        if isinstance(value, Mapping):
            return {
                self._hidden(key, disguise, False): self._hidden(child, disguise, is_models)
                for key, child in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hidden(child, disguise, is_models) for child in value]
        return value

    def _with_tags(self, text: str, disguise: Disguise) -> str:
        pieces, start = [], 0
        for tag in _TAG.finditer(text):
            if tag.group() not in self._tokens or tag.group() in self._own_tags:
                pieces += [text[start : tag.start()].translate(disguise.table), tag.group()]
                start = tag.end()
        return "".join([*pieces, text[start:].translate(disguise.table)])

    def encode(self, text: str, disguise: Disguise) -> list[int] | None:
        """Token ids of a rendered text, in which control tokens are the template's only.

        Returns None if the revealed text has the template's control tokens and no other, so that any way to encode it
        will do.
        """
        if self._pattern is None or not (disguise.is_used or self._is_normalized):
            return None
        own = self.places(text)
        if not self._is_normalized and own == self.places(disguise.reveal(text)):
            return None
        if self._aliased is None:
            self._aliased = _Aliased(self._fast, self._tokens)
        aliased = self._aliased
        pieces, start = [], 0
        for begin, end, name in own:
            pieces += [text[start:begin], aliased.text_of(name)]
            start = end
        marked = "".join([*pieces, text[start:]])
        ids = aliased.encode(disguise.reveal(marked))
        if not self._ids.isdisjoint(ids):
            # Some models of vocabularies find such a token in plain text. A break inside leaves no such text.
            ids = aliased.encode(disguise.reveal(marked, behind=aliased.break_text))
        return aliased.real(ids)

    def places(self, text: str) -> list[tuple[int, int, str]]:
        """Begin, end and name of each control token in a text."""
        if not self._is_normalized:
            return [(*match.span(), match.group()) for match in self._pattern.finditer(text)] if self._pattern else []
        encoding = run(self._fast, text)
        offsets = zip(encoding.ids, encoding.offsets, strict=True)
        return [(*span, self._fast.id_to_token(token) or "") for token, span in offsets if token in self._ids]


class _Aliased:
    """The tokenizer with another text for each control token, while their own texts are plain text."""

    def __init__(self, fast: FastTokenizer, tokens: Mapping[str, Mapping[str, Any]]) -> None:
        spec = json.loads(fast.to_str())
        for token in spec["added_tokens"]:
            token["special"] = token["special"] or token["content"] in tokens
        self._fast = FastTokenizer.from_str(json.dumps(spec))
        self._fast.encode_special_tokens = True
        nonce = secrets.token_hex(8)
        self._aliases = {text: f"\U0010fffe{nonce}{index}\U0010fffe" for index, text in enumerate(tokens)}
        self.break_text = f"\U0010fffe{nonce}\U0010fffe"
        flags = ("single_word", "lstrip", "rstrip")
        self._fast.add_tokens(
            [
                AddedToken(self._aliases[text], normalized=False, **{flag: token[flag] for flag in flags})
                for text, token in tokens.items()
            ]
            + [AddedToken(self.break_text, normalized=False)]
        )
        self._real: dict[int | None, int | None] = {
            self._fast.token_to_id(alias): tokens[text]["id"] for text, alias in self._aliases.items()
        }
        self._real[self._fast.token_to_id(self.break_text)] = None

    def text_of(self, token: str) -> str:
        return self._aliases[token]

    def encode(self, text: str) -> list[int]:
        return list(run(self._fast, text).ids)

    def real(self, ids: Iterable[int]) -> list[int]:
        """The ids with aliases replaced by what they stand for."""
        found = (self._real.get(token, token) for token in ids)
        return [token for token in found if token is not None]


def run(fast: FastTokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encodes one text as a batch, which releases the interpreter lock (``encode`` does not)."""
    (encoding,) = fast.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding


def _is_control(token: Mapping[str, Any], literals: str, named: frozenset[str]) -> bool:
    text: str = token["content"]
    if token["special"] or text in named:
        return bool(text)
    if not text.strip():
        return False  # Runs of spaces.
    is_word = text.isalpha() and text.islower()
    return _MARK.fullmatch(text) is not None or (text in literals and not is_word)


def _partner(tag: str) -> str:
    """The closing tag of an opening one, and the other way around; empty for other texts."""
    if not _TAG.fullmatch(tag):
        return ""
    return f"<{tag[2:]}" if tag.startswith("</") else f"</{tag[1:]}"


def _guarded_chars(text: str) -> set[str]:
    """Characters without which a text is not this token: those that words lack, if there are any."""
    marks = {char for char in text if not char.isalnum() and not char.isspace() and char != "_"}
    return marks or {text[0]}


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
