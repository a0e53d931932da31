"""Tokenizer files of a model directory, read like ``transformers`` reads them.

Special tokens stand in several files: in ``tokenizer.json``; by name or by id in ``tokenizer_config.json``; and, in
older directories, in ``special_tokens_map.json`` and ``added_tokens.json``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from neaptide.models.fields import MAX_TOKENIZER_BYTES, read_json, read_text
from neaptide.models.tokens import read_tokenizer_config, token_content
from neaptide.server.text.chat_template import DEFAULT

PROCESSOR_TEMPLATE = "chat_template.json"
"""The template as processors of images keep it."""
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
MAX_TEMPLATE_CHARS = 1 << 20
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Content of the files.

    Args:
        text: ``tokenizer.json``.
        config: ``tokenizer_config.json``, with what older files add.
    """

    directory: Path
    text: str
    config: Mapping[str, Any]
    named: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by name, such as ``eos_token``."""

    @classmethod
    def read(cls, directory: Path) -> "TokenizerFiles":
        """Reads the files.

        Raises:
            ValueError: a file is missing or unusable; the message names it and a remedy.
        """
        file = directory / TOKENIZER
        if not file.exists():
            raise ValueError(
                f"{file.name} is missing in {directory}; save_pretrained of transformers' AutoTokenizer writes one"
            )
        config = read_tokenizer_config(directory)
        named = {
            name: text
            for name, value in config.items()
            if name.endswith("_token") and (text := token_content(value)) is not None
        }
        return cls(directory, read_text(file, MAX_TOKENIZER_BYTES), config, named)

    def fast(self) -> FastTokenizer:
        """The tokenizer with the added tokens of all files.

        Raises:
            ValueError: ``tokenizer.json`` is damaged.
        """
        try:
            fast = FastTokenizer.from_str(self.text)
            known = {token.content for token in fast.get_added_tokens_decoder().values()}
            fast.add_tokens([token for token in self._added() if token.content not in known])
        except Exception as error:  # The library has no class for this error.
            raise ValueError(f"{TOKENIZER} cannot be used: {error}") from error
        fast.no_truncation()
        fast.no_padding()
        return fast

    def _added(self) -> Iterator[AddedToken]:
        """Added tokens of the other files, in the order of their ids; named ones are special."""
        listed = self.config.get("added_tokens_decoder")
        if isinstance(listed, dict):
            for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
                yield AddedToken(token["content"], **{flag: token[flag] for flag in _FLAGS if flag in token})
        special = [*self.named.values(), *self._extra()]
        legacy = self.directory / "added_tokens.json"
        if not listed and legacy.exists():
            for text, _ in sorted(read_json(legacy).items(), key=lambda item: int(item[1])):
                yield AddedToken(text, special=text in special, normalized=text not in special)
        for text in special:
            yield AddedToken(text, special=True, normalized=False)

    def _extra(self) -> list[str]:
        """Special tokens without a name of their own."""
        more = self.config.get("extra_special_tokens") or self.config.get("additional_special_tokens") or []
        contents = map(token_content, more.values() if isinstance(more, dict) else more)
        return [content for content in contents if content is not None]

    def templates(self) -> dict[str, str]:
        """The sources of the chat templates, by name. Files come before the configuration.

        Raises:
            ValueError: an entry is no text, or they are too long.
        """
        found = self._templates()
        if sum(map(len, found.values())) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"the chat templates have more than {MAX_TEMPLATE_CHARS} characters")
        return found

    def _templates(self) -> dict[str, str]:
        found: dict[str, str] = {}
        file = self.directory / "chat_template.jinja"
        if file.exists():
            found[DEFAULT] = read_text(file)
        for extra in sorted(self.directory.glob("additional_chat_templates/*.jinja")):
            found[extra.stem] = read_text(extra)
        if found:
            return found
        processor = self.directory / PROCESSOR_TEMPLATE
        source = (read_json(processor) if processor.exists() else self.config).get("chat_template")
        if isinstance(source, list):
            pairs = [(entry.get("name"), entry.get("template")) for entry in source if isinstance(entry, dict)]
            return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
        if source is not None and not isinstance(source, str):
            raise ValueError(f"the chat template of {CONFIG} is neither a text nor a list of named ones")
        return {} if source is None else {DEFAULT: source}
