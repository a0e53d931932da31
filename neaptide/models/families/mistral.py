"""Mistral: Llama, in some checkpoints with a sliding attention window.

Neaptide computes full attention. A token sees as many tokens as the window is long, including itself, so up to that
length both are the same. Such a checkpoint is served with contexts of at most its window.
"""

from neaptide.models.config import ModelConfig
from neaptide.models.families.llama_like import Biases, parse_llama_like, refuse, within_window
from neaptide.models.fields import RawConfig, positive_int

ARCHITECTURE = "MistralForCausalLM"
_WINDOW_TOKENS = 4096
"""Default if the file has no entry for the window; null means no window."""


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of a Mistral checkpoint.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or the variant is not supported.
    """
    refuse(raw, "attention_bias", "mlp_bias", "layer_types")
    config = parse_llama_like(raw, eos_token_ids, ARCHITECTURE, Biases(), context_tokens=131_072)
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return config
    window_tokens = positive_int(raw, "sliding_window", _WINDOW_TOKENS)
    return within_window(config, window_tokens)
