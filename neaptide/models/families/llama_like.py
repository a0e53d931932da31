"""Parsing shared by Llama and its descendants."""

from dataclasses import replace
from typing import NamedTuple

from neaptide.models.config import LlamaLikeConfig, UnsupportedModelError
from neaptide.models.fields import RawConfig, dtype, number, positive_int
from neaptide.models.rope import context, fields_of, rope


class Biases(NamedTuple):
    """Which projections have a bias."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


def parse_llama_like(
    raw: RawConfig,
    eos_token_ids: tuple[int, ...],
    architecture: str,
    biases: Biases,
    *,
    context_tokens: int,
    head_dim: int | None = None,
) -> LlamaLikeConfig:
    """The configuration of a Llama-like checkpoint.

    Args:
        raw: ``config.json``.
        eos_token_ids: of the model.
        architecture: its name in the registry.
        biases: of this family.
        context_tokens: the family's default for ``max_position_embeddings``.
        head_dim: the family's default; None divides ``hidden_size`` by the number of heads.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or the variant is not supported.
    """
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {raw['hidden_act']!r} is not supported: only silu")
    hidden_size = positive_int(raw, "hidden_size")
    num_heads = positive_int(raw, "num_attention_heads")
    num_kv_heads = positive_int(raw, "num_key_value_heads", num_heads)
    head_dim = positive_int(raw, "head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    rotary_dim = _rotary_dim(raw, head_dim)
    trained_tokens = positive_int(raw, "max_position_embeddings", context_tokens)
    lengths = context(raw, trained_tokens)
    return LlamaLikeConfig(
        architecture=architecture,
        vocab_size=positive_int(raw, "vocab_size"),
        max_position_embeddings=lengths.longest,
        default_context_tokens=lengths.default,
        eos_token_ids=eos_token_ids,
        hidden_size=hidden_size,
        intermediate_size=positive_int(raw, "intermediate_size"),
        num_layers=positive_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(raw, "rms_norm_eps", 1e-6),
        rope=rope(raw, rotary_dim, trained_tokens),
        rotary_dim=rotary_dim,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=biases.qkv,
        out_bias=biases.out,
        mlp_bias=biases.mlp,
        dtype=dtype(raw),
    )


def _rotary_dim(raw: RawConfig, head_dim: int) -> int:
    share = number(fields_of(raw), "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise UnsupportedModelError(f"partial_rotary_factor {share} is not supported: {rotary_dim} of {head_dim} pairs")
    return rotary_dim


def refuse(raw: RawConfig, *keys: str) -> None:
    """Refuses features that the family does not support.

    Raises:
        UnsupportedModelError: one of the keys is set.
    """
    for key in keys:
        if raw.get(key):
            raise UnsupportedModelError(f"{key} is not supported")


def refuse_windows(raw: RawConfig) -> None:
    """Refuses sliding windows, in families whose layers may each have one.

    Raises:
        UnsupportedModelError: some layers have one.
    """
    refuse(raw, "use_sliding_window")
    kinds = sorted({str(kind) for kind in raw.get("layer_types") or ()} - {"full_attention"})
    if kinds:
        raise UnsupportedModelError(f"layer_types {', '.join(kinds)} is not supported: only full_attention")


def within_window(config: LlamaLikeConfig, window_tokens: int) -> LlamaLikeConfig:
    """The configuration with contexts of at most a sliding window's length, up to which full attention is the same."""
    return replace(
        config,
        max_position_embeddings=min(config.max_position_embeddings, window_tokens),
        default_context_tokens=min(config.served_context_tokens, window_tokens),
    )
