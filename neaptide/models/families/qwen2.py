"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from neaptide.models.config import ModelConfig
from neaptide.models.families.llama_like import Biases, parse_llama_like, refuse, refuse_windows
from neaptide.models.fields import RawConfig

ARCHITECTURE = "Qwen2ForCausalLM"


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of a Qwen2 checkpoint.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or the variant is not supported.
    """
    refuse_windows(raw)
    refuse(raw, "mlp_bias")
    return parse_llama_like(raw, eos_token_ids, ARCHITECTURE, Biases(qkv=True), context_tokens=32_768)
