"""Llama and its descendants with RMS norms. Each parser says what differs from Llama.

All of them raise ``UnsupportedModelError`` if a value is missing or invalid, or the variant is not supported.
"""

from dataclasses import replace

from neaptide.models.config import DecoderConfig, TensorNames, UnsupportedModelError
from neaptide.models.families.decoder import (
    flag,
    parse_decoder,
    refuse,
    refuse_windows,
    with_defaults,
    within_window,
)
from neaptide.models.fields import RawConfig, number, positive_int

Ends = tuple[int, ...]
"""End-of-sequence tokens."""

_STACKED = TensorNames(up=("mlp.gate_up_proj",))


def llama(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Llama: RMS norms, rotary positions, grouped-query attention, gated SiLU."""
    refuse(raw, "sliding_window")
    return _with_biases(raw, parse_decoder(raw, ends, context_tokens=2048))


def _with_biases(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """Biases as Llama names them."""
    bias = flag(raw, "attention_bias")
    return replace(config, qkv_bias=bias, out_bias=bias, mlp_bias=flag(raw, "mlp_bias"))


def mistral(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Mistral: in some checkpoints with a sliding attention window, which is 4,096 if there is no entry."""
    refuse(raw, "attention_bias", "mlp_bias", "layer_types")
    config = parse_decoder(raw, ends, context_tokens=131_072)
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return config
    return within_window(config, positive_int(raw, "sliding_window", 4096))


def qwen2(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""
    refuse_windows(raw)
    refuse(raw, "mlp_bias")
    return replace(parse_decoder(raw, ends, context_tokens=32_768), qkv_bias=True)


def qwen3(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Qwen3: a norm on every head of queries and keys; ``head_dim`` does not follow from ``hidden_size``."""
    refuse_windows(raw)
    refuse(raw, "mlp_bias")
    config = parse_decoder(raw, ends, context_tokens=32_768, head_dim=128)
    return replace(_with_biases(raw, config), qk_norm="head")


def phi3(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Phi-3, Phi-3.5 and Phi-4: stacked projections, partial rotation, in some checkpoints a sliding window."""
    refuse(raw, "attention_bias", "mlp_bias")
    names = _STACKED._replace(qkv=("self_attn.qkv_proj",))
    config = replace(parse_decoder(raw, ends, context_tokens=4096), names=names)
    if raw.get("sliding_window") is None:
        return config
    return within_window(config, positive_int(raw, "sliding_window"))


def internlm3(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """InternLM3: biases with other names."""
    config = parse_decoder(raw, ends, context_tokens=32_768, head_dim=128, eps=1e-5)
    bias = flag(raw, "bias")
    return replace(config, qkv_bias=flag(raw, "qkv_bias"), out_bias=bias, mlp_bias=bias)


def smollm3(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """SmolLM3: some layers without positions, by default every fourth."""
    refuse_windows(raw)
    raw = with_defaults(raw, rope_theta=2e6, tie_word_embeddings=True)
    config = _with_biases(raw, parse_decoder(raw, ends, context_tokens=32_768))
    every = positive_int(raw, "no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        rotated = [(layer + 1) % every for layer in range(config.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != config.num_layers:
        raise UnsupportedModelError(f"config.json: no_rope_layers must be a list of {config.num_layers} numbers")
    unrotated = frozenset(layer for layer, is_rotated in enumerate(rotated) if not is_rotated)
    return replace(config, unrotated_layers=unrotated)


def granite(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Granite 3: factors on embeddings, attention, residuals and logits."""
    return replace(
        _with_biases(raw, parse_decoder(raw, ends, context_tokens=2048)),
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logit_scale=1 / number(raw, "logits_scaling", 1.0),
    )


def hyperclovax(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """HyperCLOVA X: Granite with norms before and after, and logits that are multiplied."""
    config = granite(raw, ends)
    has_both = flag(raw, "use_post_norm", True)
    return replace(
        config,
        attention_scale=number(raw, "attention_multiplier", config.head_dim**-0.5),
        logit_scale=number(raw, "logits_scaling", 1.0),
        norm_place="both" if has_both else "before",
        names=TensorNames(attention_out_norm="post_norm1", mlp_out_norm="post_norm2"),
    )


def olmo2(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """OLMo 2: norms after attention and feed-forward, and on all queries and all keys."""
    config = parse_decoder(raw, ends, context_tokens=2048, eps=1e-5)
    return replace(_with_biases(raw, config), norm_place="after", qk_norm="all")


def exaone4(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """EXAONE 4: norms after attention and feed-forward, and on every head.

    Checkpoints with a sliding window rotate only the layers that have it.
    """
    config = parse_decoder(raw, ends, context_tokens=2048, eps=1e-5)
    config = replace(config, norm_place="after", qk_norm="head")
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return config
    kinds = raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != config.num_layers:
        raise UnsupportedModelError(f"config.json: layer_types must be a list of {config.num_layers} names")
    full = frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return within_window(replace(config, unrotated_layers=full), positive_int(raw, "sliding_window", 4096))


def hunyuan(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Hunyuan, dense: a norm on every head of queries and keys, after the rotation."""
    config = parse_decoder(raw, ends, context_tokens=2048, eps=1e-5)
    bias = flag(raw, "attention_bias")
    return replace(
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        qk_norm_after_rotation=True,
        names=TensorNames(qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm")),
    )


def ernie(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """ERNIE 4.5, dense: rotated pairs next to each other."""
    raw = with_defaults(raw, rope_theta=5e5, tie_word_embeddings=True)
    config = parse_decoder(raw, ends, context_tokens=131_072, eps=1e-5)
    bias = flag(raw, "use_bias")
    return replace(config, qkv_bias=bias, out_bias=bias, mlp_bias=bias, adjacent_pairs=True)


def helium(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Helium: rotated pairs next to each other."""
    raw = with_defaults(raw, rope_theta=1e5)
    config = parse_decoder(raw, ends, context_tokens=4096, head_dim=128, eps=1e-8)
    return replace(_with_biases(raw, config), out_bias=False, adjacent_pairs=True)


def glm(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """GLM-4: partial rotation of pairs next to each other, stacked gate and up projection."""
    raw = with_defaults(raw, partial_rotary_factor=0.5)
    config = parse_decoder(raw, ends, context_tokens=131_072, head_dim=128, eps=1.5625e-7)
    return replace(config, qkv_bias=flag(raw, "attention_bias", True), adjacent_pairs=True, names=_STACKED)


def glm4(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """GLM-4-0414: GLM-4 with norms before and after."""
    names = _STACKED._replace(attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
    return replace(glm(raw, ends), norm_place="both", names=names)


def seed_oss(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Seed-OSS: an own entry for the bias after the attention."""
    config = parse_decoder(raw, ends, context_tokens=524_288, head_dim=128)
    return replace(
        config,
        qkv_bias=flag(raw, "attention_bias", True),
        out_bias=flag(raw, "attention_out_bias"),
        mlp_bias=flag(raw, "mlp_bias"),
    )


def arcee(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Arcee: a feed-forward without a gate, with squared ReLU."""
    config = parse_decoder(raw, ends, context_tokens=4096, eps=1e-5, activations=("relu2",))
    return replace(_with_biases(raw, config), gated=False, names=TensorNames(up=("mlp.up_proj",)))
