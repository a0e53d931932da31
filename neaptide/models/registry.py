"""The model families, by the architecture that a ``config.json`` names. A new family is one line here, a parser in
``neaptide.models.families`` and, where none of those that are there computes it, a class in
``neaptide.executors.torch.models``.
"""

from collections.abc import Callable
from typing import NamedTuple

from neaptide.models.config import ModelConfig, UnsupportedModelError
from neaptide.models.families import llama, mistral, opt, qwen2, qwen3
from neaptide.models.fields import RawConfig


class Family(NamedTuple):
    parse_config: Callable[[RawConfig, tuple[int, ...]], ModelConfig]
    """From ``config.json`` and the end-of-sequence tokens."""
    torch_class: str
    """``module:class`` of its ``TorchModel``, imported by the torch executor alone."""


_MODELS = "neaptide.executors.torch.models"
_LLAMA = f"{_MODELS}.llama:Llama"
"""Computes what differs from it by biases, or by nothing."""

FAMILIES: dict[str, Family] = {
    llama.ARCHITECTURE: Family(llama.parse_config, _LLAMA),
    mistral.ARCHITECTURE: Family(mistral.parse_config, _LLAMA),
    opt.ARCHITECTURE: Family(opt.parse_config, f"{_MODELS}.opt:Opt"),
    qwen2.ARCHITECTURE: Family(qwen2.parse_config, _LLAMA),
    qwen3.ARCHITECTURE: Family(qwen3.parse_config, f"{_MODELS}.qwen3:Qwen3"),
}


def family_of(architectures: object) -> Family:
    """
    Args:
        architectures: the entry of ``config.json``: a list of one name.

    Raises:
        UnsupportedModelError: none of ours.
    """
    if isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in FAMILIES:
        return FAMILIES[architectures[0]]
    raise UnsupportedModelError(f"architecture {architectures} is not supported: only {', '.join(sorted(FAMILIES))}")
