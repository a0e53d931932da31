"""Llama: RMS norms, rotary positions, grouped-query attention, gated SiLU."""

from neaptide.models.config import ModelConfig, UnsupportedModelError
from neaptide.models.fields import RawConfig, dtype, number, positive_int, rope

ARCHITECTURE = "LlamaForCausalLM"


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """
    Raises:
        UnsupportedModelError: a value that is missing or nonsense, or a variant that ``models.llama`` does not compute.
    """
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {raw['hidden_act']!r} is not supported: only silu")
    if raw.get("sliding_window"):
        raise UnsupportedModelError("sliding_window is not supported")
    hidden_size = positive_int(raw, "hidden_size")
    num_heads = positive_int(raw, "num_attention_heads")
    num_kv_heads = positive_int(raw, "num_key_value_heads", num_heads)
    head_dim = positive_int(raw, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    return ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=positive_int(raw, "vocab_size"),
        max_position_embeddings=positive_int(raw, "max_position_embeddings", 2048),
        eos_token_ids=eos_token_ids,
        hidden_size=hidden_size,
        intermediate_size=positive_int(raw, "intermediate_size"),
        num_layers=positive_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=dtype(raw),
    )
