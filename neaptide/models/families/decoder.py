"""Parsing shared by all families: sizes, positions, windows, and entries with other names or defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from neaptide.models.config import VLLM, DecoderConfig, UnsupportedModelError
from neaptide.models.fields import RawConfig, dtype, number, positive_int
from neaptide.models.rope import context, fields_of, rope

NO_KEYS: Mapping[str, str] = MappingProxyType({})


def parse_decoder(
    raw: RawConfig,
    eos_token_ids: tuple[int, ...],
    *,
    context_tokens: int,
    head_dim: int | None = None,
    eps: float = 1e-6,
    activations: Sequence[str] = ("silu",),
    is_rotated: bool = True,
    keys: Mapping[str, str] = NO_KEYS,
) -> DecoderConfig:
    """The configuration of a checkpoint like Llama's, to which a family adds its own traits.

    Args:
        raw: ``config.json``.
        eos_token_ids: of the model.
        context_tokens: the family's default for ``max_position_embeddings``.
        head_dim: the family's default; None divides ``hidden_size`` by the number of heads.
        eps: the family's default for ``rms_norm_eps``.
        activations: those that the family may have, with its default first.
        is_rotated: False for learned positions.
        keys: the family's name of an entry, by Llama's.

    Raises:
        UnsupportedModelError: a value is missing or invalid, or the variant is not supported.
    """

    def size(name: str, default: int | None = None) -> int:
        return positive_int(raw, keys.get(name, name), default)

    activation_key = keys.get("hidden_act", "hidden_act")
    activation = str(raw.get(activation_key) or activations[0])
    if activation not in activations:
        raise UnsupportedModelError(
            f"{activation_key} {activation!r} is not supported: only {', '.join(activations)}; {VLLM}"
        )
    hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
    num_kv_heads = size("num_key_value_heads", num_heads)
    head_dim = size("head_dim", head_dim or _head_dim(hidden_size, num_heads))
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    if is_rotated and head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    rotary_dim = _rotary_dim(raw, head_dim) if is_rotated else 0
    trained_tokens = size("max_position_embeddings", context_tokens)
    lengths = context(raw, trained_tokens)
    return DecoderConfig(
        architecture=raw["architectures"][0],
        vocab_size=size("vocab_size"),
        max_position_embeddings=lengths.longest,
        default_context_tokens=lengths.default,
        eos_token_ids=eos_token_ids,
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=number(raw, keys.get("rms_norm_eps", "rms_norm_eps"), eps),
        rope=rope(raw, rotary_dim, trained_tokens) if is_rotated else None,
        rotary_dim=rotary_dim,
        activation=activation,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype(raw),
    )


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size < num_heads:
        raise UnsupportedModelError(f"hidden_size {hidden_size} is too small for {num_heads} attention heads")
    return hidden_size // num_heads


def _rotary_dim(raw: RawConfig, head_dim: int) -> int:
    share = number(fields_of(raw), "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise UnsupportedModelError(f"partial_rotary_factor {share} is not supported: {rotary_dim} of {head_dim} pairs")
    return rotary_dim


def with_defaults(raw: RawConfig, **defaults: object) -> RawConfig:
    """The entries, with a default for each of these that is missing or null."""
    return defaults | {key: value for key, value in raw.items() if value is not None or key not in defaults}


def flag(raw: RawConfig, key: str, default: bool = False) -> bool:
    value = raw.get(key)
    return default if value is None else bool(value)


def refuse(raw: RawConfig, *keys: str) -> None:
    """Refuses features that the family does not support.

    Raises:
        UnsupportedModelError: one of the keys is set.
    """
    for key in keys:
        if raw.get(key):
            raise UnsupportedModelError(f"{key} is not supported; {VLLM}")


def refuse_windows(raw: RawConfig) -> None:
    """Refuses sliding windows, in families whose layers may each have one.

    Raises:
        UnsupportedModelError: some layers have one.
    """
    refuse(raw, "use_sliding_window")
    kinds = sorted({str(kind) for kind in raw.get("layer_types") or ()} - {"full_attention"})
    if kinds:
        raise UnsupportedModelError(f"layer_types {', '.join(kinds)} is not supported: only full_attention; {VLLM}")


def within_window(config: DecoderConfig, window_tokens: int) -> DecoderConfig:
    """The configuration with contexts of at most a sliding window's length.

    Neaptide computes full attention. A token sees as many tokens as the window is long, including itself, so up to that
    length both are the same.
    """
    return replace(
        config,
        max_position_embeddings=min(config.max_position_embeddings, window_tokens),
        default_context_tokens=min(config.served_context_tokens, window_tokens),
    )
