"""OPT: learned positions, layer norms, ReLU, biases."""

from dataclasses import dataclass

from neaptide.models.config import ModelConfig, UnsupportedModelError
from neaptide.models.fields import RawConfig, dtype, positive_int

ARCHITECTURE = "OPTForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptConfig(ModelConfig):
    """A decoder of the OPT family."""

    norms_first: bool
    """Norms come before attention and feed-forward; otherwise after them, on the sum."""
    final_norm: bool
    """There is a norm after the last layer."""
    bias: bool
    """The projections have biases."""


def parse_config(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The configuration of an OPT checkpoint.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or ``models.opt`` does not support the variant.
    """
    if raw.get("activation_function", "relu") != "relu":
        raise UnsupportedModelError(f"activation_function {raw['activation_function']!r} is not supported: only relu")
    if not raw.get("layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("layer_norm_elementwise_affine false is not supported: norms have weights")
    hidden_size = positive_int(raw, "hidden_size")
    num_heads = positive_int(raw, "num_attention_heads")
    if hidden_size % num_heads:
        raise UnsupportedModelError(f"hidden_size {hidden_size} is not a multiple of the {num_heads} attention heads")
    embedded = positive_int(raw, "word_embed_proj_dim", hidden_size)
    if embedded != hidden_size:
        raise UnsupportedModelError(f"word_embed_proj_dim {embedded} is not supported: only hidden_size, {hidden_size}")
    norms_first = bool(raw.get("do_layer_norm_before", True))
    return OptConfig(
        architecture=ARCHITECTURE,
        vocab_size=positive_int(raw, "vocab_size"),
        max_position_embeddings=positive_int(raw, "max_position_embeddings", 2048),
        eos_token_ids=eos_token_ids,
        hidden_size=hidden_size,
        intermediate_size=positive_int(raw, "ffn_dim"),
        num_layers=positive_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
        norms_first=norms_first,
        final_norm=norms_first and not raw.get("_remove_final_layer_norm", False),
        bias=bool(raw.get("enable_bias", True)),
        dtype=dtype(raw),
    )
