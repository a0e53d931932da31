"""Tokens that end an output, and the tokenizer's configuration in which some are named."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neaptide.models.fields import read_json

_LEGACY = "special_tokens_map.json"


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """``tokenizer_config.json``; without added tokens of its own, also the older files that named them.

    Raises:
        UnsupportedModelError: a file cannot be read.
    """
    file = directory / "tokenizer_config.json"
    config = read_json(file) if file.exists() else {}
    if not config.get("added_tokens_decoder"):
        legacy = directory / _LEGACY
        config |= read_json(legacy) if legacy.exists() else {}
    return config


def token_content(token: object) -> str | None:
    """Text of a special token, which configurations give as text or as an object with ``content``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None
