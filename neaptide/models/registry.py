"""The model families, by the architecture in ``config.json``.

A new family needs one line here and a parser in ``neaptide.models.families``. If no existing class computes it, it also
needs one in ``neaptide.executors.torch.models``.
"""

from collections.abc import Callable
from typing import NamedTuple

from neaptide.models.config import ModelConfig, UnsupportedModelError
from neaptide.models.families import llama, mistral, opt, phi3, qwen2, qwen3
from neaptide.models.fields import RawConfig


class Family(NamedTuple):
    parse_config: Callable[[RawConfig, tuple[int, ...]], ModelConfig]
    """Makes the configuration from ``config.json`` and the end-of-sequence tokens."""
    torch_class: str
    """``module:class`` of its ``TorchModel``, imported by the torch executor only."""


_MODELS = "neaptide.executors.torch.models"
_LLAMA = f"{_MODELS}.llama:Llama"
"""Computes families that differ from Llama only in biases, or not at all."""

FAMILIES: dict[str, Family] = {
    llama.ARCHITECTURE: Family(llama.parse_config, _LLAMA),
    mistral.ARCHITECTURE: Family(mistral.parse_config, _LLAMA),
    opt.ARCHITECTURE: Family(opt.parse_config, f"{_MODELS}.opt:Opt"),
    phi3.ARCHITECTURE: Family(phi3.parse_config, f"{_MODELS}.phi3:Phi3"),
    qwen2.ARCHITECTURE: Family(qwen2.parse_config, _LLAMA),
    qwen3.ARCHITECTURE: Family(qwen3.parse_config, f"{_MODELS}.qwen3:Qwen3"),
}


def family_of(architectures: object) -> Family:
    """The family of a model.

    Args:
        architectures: the entry of ``config.json``, a list with one name.

    Raises:
        UnsupportedModelError: the architecture is not supported.
    """
    if isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in FAMILIES:
        return FAMILIES[architectures[0]]
    raise UnsupportedModelError(
        f"architecture {architectures} is not supported: only {', '.join(sorted(FAMILIES))}; "
        "--executor vllm serves other families"
    )
