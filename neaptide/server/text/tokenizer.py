"""Tokenizer of one model: text to token ids and back. Thread-safe; call it off the event loop.

A user can type the text of a special token. In a conversation only the *template* may make special tokens; otherwise
users could end their own turn and speak as the system. So special-token text of the caller is replaced by a one-time
marker, and the template is rendered and encoded. The text between the template's own special tokens is then encoded
again, with the markers reverted and special tokens switched off.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from neaptide.server.http.errors import InvalidRequestError, UnsupportedParameterError
from neaptide.server.text.chat_template import ChatTemplate, Message
from neaptide.server.text.piece_cache import PieceCache

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", *_SPECIAL_NAMES})


def _byte_of_char() -> dict[str, int]:
    """Inverse of byte-level BPE's map from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = [b for b in range(256) if b not in set(printable)]
    table.update({chr(0x100 + i): b for i, b in enumerate(rest)})
    return table


class Tokenizer:
    """Reads ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a model directory."""

    def __init__(self, directory: Path) -> None:
        """Loads the tokenizer.

        Raises:
            ValueError: a file is missing or unusable; the message names it and a remedy.
        """
        self.directory = directory
        text = _read_tokenizer(directory)
        self._fast = _plain(text)
        self._literal = _plain(text)
        self._literal.encode_special_tokens = True
        spec = json.loads(text)
        added = spec.get("added_tokens", [])
        self._pieces = PieceCache.create(self._fast, spec, special=True)
        self._literal_pieces = PieceCache.create(self._literal, spec, special=False)
        self._adds_tokens = spec.get("post_processor") is not None
        self._special_ids = frozenset(t["id"] for t in added if t["special"])
        self._added_ids = {t["content"]: t["id"] for t in added}
        specials = sorted((t["content"] for t in added if t["special"]), key=len, reverse=True)
        self._special_text = re.compile("|".join(map(re.escape, specials))) if specials else None
        decoders = _decoder_types(spec.get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_of_char = _byte_of_char()
        self._token_bytes: dict[int, bytes] = {}
        self._token_texts: dict[int, str] = {}
        self._config = _read_config(directory)
        self.template = self._load_template(directory)
        self.vocab_size = self._fast.get_vocab_size(with_added_tokens=True)

    # ---- encoding ----

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt. Special-token text is parsed, because its author writes the template by hand."""
        if self._pieces and not (add_special_tokens and self._adds_tokens):
            ids = self._pieces.encode(text)
            if ids is not None:
                return ids
        return _run(self._fast, text, add_special_tokens=add_special_tokens).ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        max_chars: int = 1 << 25,
    ) -> list[int]:
        """Token ids of a conversation rendered by the chat template; no text in it becomes a special token.

        Raises:
            InvalidRequestError: there is no template, it refuses the conversation, or that is too long.
        """
        if self.template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        variables = variables or {}
        if not _RESERVED_VARIABLES.isdisjoint(variables):
            raise UnsupportedParameterError("A reserved name cannot be set.", param="chat_template_kwargs")
        marker = _Marker(self._special_text)
        messages = marker.hide(messages)
        text = self.template.render(
            messages,
            tools=marker.hide(tools),
            add_generation_prompt=add_generation_prompt,
            variables=marker.hide(variables),
            max_chars=max_chars,
        )
        if continue_final_message:
            text = _cut_after_final(text, messages)
        if not marker.hidden:
            return self.encode(text, add_special_tokens=False)
        return self._encode_marked(text, marker)

    def _encode_marked(self, text: str, marker: "_Marker") -> list[int]:
        encoding = _run(self._fast, text)
        ids: list[int] = []
        start = 0
        for index, token_id in enumerate(encoding.ids):
            if token_id in self._special_ids and (span := encoding.token_to_chars(index)) is not None:
                begin, end = span
                ids += self._encode_literal(marker.reveal(text[start:begin]))
                ids.append(token_id)
                start = end
        return ids + self._encode_literal(marker.reveal(text[start:]))

    def _encode_literal(self, text: str) -> list[int]:
        ids = self._literal_pieces.encode(text) if self._literal_pieces else None
        return _run(self._literal, text).ids if ids is None else ids

    # ---- decoding ----

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of whole token sequences."""
        # As a batch, for the same reason as in ``_run``.
        (text,) = self._fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether the token is structure rather than text."""
        return token_id in self._special_ids

    def added_id(self, text: str) -> int | None:
        """The token that was added for exactly this text, special or not. Such text always becomes this token."""
        return self._added_ids.get(text)

    @property
    def added_texts(self) -> Collection[str]:
        """Texts of all added tokens."""
        return self._added_ids.keys()

    def special_ids_in(self, texts: Iterable[str]) -> set[int]:
        """Special tokens that are parts of the texts."""
        whole = "\0".join(texts)
        return {number for text, number in self._added_ids.items() if number in self._special_ids and text in whole}

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling; empty for ids that only pad the embedding table."""
        return self._fast.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the output; they may be parts of characters."""
        cached = self._token_bytes.get(token_id)
        if cached is None:
            cached = self._token_bytes[token_id] = self._bytes_of(self.token_string(token_id))
        return cached

    def token_text(self, token_id: int) -> str:
        """Text of a token for log-probability tables, or ``bytes:\\x..`` if its bytes are not valid text."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = _text_of(self.token_bytes(token_id))
        return text

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            table = self._byte_of_char
            return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    # ---- description ----

    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration with the keys that remote clients expect."""
        named = {name: _token_content(self._config.get(name)) for name in _SPECIAL_NAMES[:4]}
        source = self.template.source if self.template else None
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self._config, **named, "chat_template": source}

    def _load_template(self, directory: Path) -> ChatTemplate | None:
        file = directory / "chat_template.jinja"
        source: Any = file.read_text(encoding="utf-8") if file.exists() else self._config.get("chat_template")
        if isinstance(source, list):
            source = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ValueError("the chat template of tokenizer_config.json is neither a text nor a list of named ones")
        tokens = {name: _token_content(self._config.get(name)) for name in _SPECIAL_NAMES}
        return ChatTemplate(source, {name: token for name, token in tokens.items() if token is not None})


class _Marker:
    """Replaces special-token text of a caller by markers that cannot be guessed."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._nonce = secrets.token_hex(8)
        self.hidden: list[str] = []

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._replace, value) if self._pattern else value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(child) for child in value]
        return value

    def reveal(self, text: str) -> str:
        return re.sub(f"{self._nonce}x(\\d+)x", lambda match: self.hidden[int(match.group(1))], text)

    def _replace(self, match: re.Match[str]) -> str:
        self.hidden.append(match.group())
        return f"{self._nonce}x{len(self.hidden) - 1}x"


def _text_of(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _run(fast: FastTokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encodes one text as a batch, which releases the interpreter lock (``encode`` does not)."""
    (encoding,) = fast.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding


def _read_tokenizer(directory: Path) -> str:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{file.name} is missing in {directory}; save_pretrained of transformers' AutoTokenizer writes one"
        )
    return file.read_text(encoding="utf-8")


def _plain(text: str) -> FastTokenizer:
    try:
        fast = FastTokenizer.from_str(text)
    except Exception as error:  # The library has no class for this error.
        raise ValueError(f"tokenizer.json cannot be used: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    return fast


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_decoder_types(d) for d in decoder.get("decoders", [])))


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _token_content(token: Any) -> str | None:
    """Text of a special token, which configurations give as text or as an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _cut_after_final(text: str, messages: Sequence[Message]) -> str:
    content = messages[-1].get("content")
    final = content.strip() if isinstance(content, str) else ""
    place = text.rfind(final) if final else -1
    if place < 0:
        raise InvalidRequestError(
            "The final message has no text that could be continued.", param="continue_final_message"
        )
    return text[: place + len(final)]
