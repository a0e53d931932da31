"""Qwen3: Llama with RMS norms on every head of queries and keys."""

from neaptide.models.config import ModelConfig
from neaptide.models.families.llama_like import Biases, parse_llama_like, refuse, refuse_windows
from neaptide.models.fields import RawConfig

ARCHITECTURE = "Qwen3ForCausalLM"
_HEAD_DIM = 128
"""Default if the file has none; it does not follow from ``hidden_size``."""


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of a Qwen3 checkpoint.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or ``models.qwen3`` does not support the variant.
    """
    refuse_windows(raw)
    refuse(raw, "mlp_bias")
    attention = bool(raw.get("attention_bias", False))
    biases = Biases(qkv=attention, out=attention)
    return parse_llama_like(raw, eos_token_ids, ARCHITECTURE, biases, context_tokens=32_768, head_dim=_HEAD_DIM)
