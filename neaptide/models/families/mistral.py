"""Mistral: Llama, of which some checkpoints look back over a sliding window only.

Full attention is computed. A token sees as many tokens as the window is long, itself included, so that up to that
length the two are the same: such a checkpoint is served with contexts of at most its window.
"""

from dataclasses import replace

from neaptide.models.config import ModelConfig
from neaptide.models.families.llama_like import Biases, parse_llama_like, refuse
from neaptide.models.fields import RawConfig, positive_int

ARCHITECTURE = "MistralForCausalLM"
_WINDOW_TOKENS = 4096
"""Where the file does not speak of a window; null says that there is none."""


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """
    Raises:
        UnsupportedModelError: a value that is missing or nonsense, or a variant that is not computed.
    """
    refuse(raw, "attention_bias", "mlp_bias", "layer_types")
    config = parse_llama_like(raw, eos_token_ids, ARCHITECTURE, Biases(), context_tokens=131_072)
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return config
    window_tokens = positive_int(raw, "sliding_window", _WINDOW_TOKENS)
    return replace(config, max_position_embeddings=min(config.max_position_embeddings, window_tokens))
