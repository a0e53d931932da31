"""Llama: RMS norms, rotary positions, grouped-query attention, gated SiLU."""

from neaptide.models.config import ModelConfig
from neaptide.models.families.llama_like import Biases, parse_llama_like, refuse
from neaptide.models.fields import RawConfig

ARCHITECTURE = "LlamaForCausalLM"


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of a Llama checkpoint.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or ``models.llama`` does not support the variant.
    """
    refuse(raw, "sliding_window")
    attention = bool(raw.get("attention_bias", False))
    biases = Biases(qkv=attention, out=attention, mlp=bool(raw.get("mlp_bias", False)))
    return parse_llama_like(raw, eos_token_ids, ARCHITECTURE, biases, context_tokens=2048)
