"""Tokenizer of one model: text to token ids and back. Thread-safe; call it off the event loop."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neaptide.server.http.errors import ApiError, InvalidRequestError, UnsupportedParameterError
from neaptide.server.text.chat_template import DEFAULT, TOOL_USE, Message, TemplateFacts, TemplateInput
from neaptide.server.text.control_tokens import ControlTokens, run
from neaptide.server.text.piece_cache import PieceCache
from neaptide.server.text.rendering import ChildRenderer, OwnRenderer, Renderer
from neaptide.server.text.tokenizer_files import TokenizerFiles

_RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template"})


def _byte_of_char() -> dict[str, int]:
    """Inverse of byte-level BPE's map from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = [b for b in range(256) if b not in set(printable)]
    table.update({chr(0x100 + i): b for i, b in enumerate(rest)})
    return table


class Tokenizer:
    """Reads ``tokenizer.json``, ``tokenizer_config.json`` and the chat template of a model directory."""

    def __init__(self, directory: Path, *, isolates_templates: bool = False) -> None:
        """Loads the tokenizer.

        Args:
            directory: of the model.
            isolates_templates: render templates that are not plain in a process that can be killed; ``close`` ends
                it.

        Raises:
            ValueError: a file is missing or unusable; the message names it and a remedy.
        """
        self.directory = directory
        self._files = files = TokenizerFiles.read(directory)
        self._fast = files.fast()
        spec = json.loads(self._fast.to_str())
        added = spec["added_tokens"]
        self._pieces = PieceCache.create(self._fast, spec)
        self._adds_tokens = spec.get("post_processor") is not None
        named = frozenset(files.named.values())
        self._special_ids = frozenset(t["id"] for t in added if t["special"] or t["content"] in named)
        self._added_ids = {t["content"]: t["id"] for t in added}
        decoders = _decoder_types(spec.get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_of_char = _byte_of_char()
        self._token_bytes: dict[int, bytes] = {}
        self._token_texts: dict[int, str] = {}
        sources = files.templates()
        self.facts = {name: TemplateFacts(source) for name, source in sources.items()}
        is_isolated = isolates_templates and not all(facts.is_plain for facts in self.facts.values())
        self._renderer: Renderer = (ChildRenderer if is_isolated else OwnRenderer)(sources, files.named)
        literals = "\0".join(facts.literals for facts in self.facts.values())
        self._control = ControlTokens(self._fast, spec, literals, named)
        self.vocab_size = self._fast.get_vocab_size(with_added_tokens=True)

    def close(self) -> None:
        """Ends the process that renders templates, if there is one."""
        self._renderer.close()

    # ---- encoding ----

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt. Special-token text is parsed, because its author writes the template by hand."""
        if self._pieces and not (add_special_tokens and self._adds_tokens):
            ids = self._pieces.encode(text)
            if ids is not None:
                return ids
        return run(self._fast, text, add_special_tokens=add_special_tokens).ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continued: str | None = None,
        variables: Mapping[str, Any] | None = None,
        template: str | None = None,
        max_chars: int = 1 << 25,
    ) -> list[int]:
        """Token ids of a conversation rendered by a chat template; no text in it becomes a control token.

        Args:
            continued: the field of the last message that the prompt ends with.
            template: its name, where the model has several.

        Raises:
            InvalidRequestError: there is no such template, it refuses the conversation, or that is too long.
        """
        name = self._template_name(template, tools)
        variables = variables or {}
        if not (_RESERVED_VARIABLES | self._files.named.keys()).isdisjoint(variables):
            raise UnsupportedParameterError("A reserved name cannot be set.", param="chat_template_kwargs")
        control, disguise = self._control, self._control.disguise()
        given = TemplateInput(
            messages=control.hide_messages(messages, disguise),
            tools=control.hide(tools, disguise),
            add_generation_prompt=add_generation_prompt,
            continued=continued,
            variables=control.hide(variables, disguise),
            max_chars=max_chars,
        )
        text = self._renderer.render(name, given)
        ids = control.encode(text, disguise)
        return self.encode(disguise.reveal(text), add_special_tokens=False) if ids is None else ids

    def _template_name(self, asked: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Name of the template of a conversation, chosen as in ``transformers``."""
        if not self.facts:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        if asked is not None:
            if asked not in self.facts:
                raise UnsupportedParameterError("Only a name of the model's own templates.", param="chat_template")
            name = asked
        else:
            name = TOOL_USE if tools is not None and TOOL_USE in self.facts else DEFAULT
        if name not in self.facts:
            raise InvalidRequestError(
                "This model has several chat templates and no default; name one.", param="chat_template"
            )
        if tools is not None and not self.facts[name].shows_tools:
            raise UnsupportedParameterError(
                "The model's chat template shows no tools, so the model would not know of them.", param="tools"
            )
        return name

    def end_of_turn(self) -> int | None:
        """The control token that the template writes behind a model's turn; None if it writes none there."""
        if DEFAULT not in self.facts:
            return None
        said = "\u2042"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
        try:
            text = self._renderer.render(DEFAULT, TemplateInput(messages=turns, add_generation_prompt=False))
            opened = self._renderer.render(DEFAULT, TemplateInput(messages=turns[:1]))
            asked = self._renderer.render(DEFAULT, TemplateInput(messages=turns[:1], add_generation_prompt=False))
        except ApiError:
            return None
        if said not in text:
            return None
        behind = text.rpartition(said)[2]
        opening = {name for _, _, name in self._control.places(opened.removeprefix(asked))}
        opening.add(self._files.named.get("bos_token", ""))
        for start, _, name in self._control.places(behind)[:1]:
            if not behind[:start].strip() and name not in opening:
                return int(self._added_ids[name])
        return None

    def token_id(self, text: str) -> int | None:
        """The token of exactly this text."""
        found: int | None = self._fast.token_to_id(text)
        return found

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Special tokens that the configuration names, such as ``eos_token``."""
        return self._files.named

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
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that the files add to the vocabulary, special or not, by their text."""
        return self._added_ids

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
        named = {name: self._files.named.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        source = self.facts[DEFAULT].source if DEFAULT in self.facts else None
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self._files.config, **named, "chat_template": source}

    @property
    def template(self) -> TemplateFacts | None:
        """The template of conversations with tools; None if there is no template."""
        return self.facts.get(TOOL_USE) or self.facts.get(DEFAULT)


def _text_of(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _decoder_types(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_decoder_types(d) for d in decoder.get("decoders", [])))
