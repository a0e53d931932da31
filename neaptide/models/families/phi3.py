"""Phi-3, Phi-3.5 and Phi-4: Llama with the projections of a layer's input in one tensor, and partial rotation.

Some checkpoints have a sliding attention window; see ``mistral``.
"""

from neaptide.models.config import ModelConfig
from neaptide.models.families.llama_like import Biases, parse_llama_like, refuse, within_window
from neaptide.models.fields import RawConfig, positive_int

ARCHITECTURE = "Phi3ForCausalLM"


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of a Phi-3 checkpoint.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or ``models.phi3`` does not support the variant.
    """
    refuse(raw, "attention_bias", "mlp_bias")
    config = parse_llama_like(raw, eos_token_ids, ARCHITECTURE, Biases(), context_tokens=4096)
    if raw.get("sliding_window") is None:
        return config
    return within_window(config, positive_int(raw, "sliding_window"))
