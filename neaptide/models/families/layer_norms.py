"""Families with layer norms. Each parser says what differs from Llama.

All of them raise ``UnsupportedModelError`` if a value is missing or invalid, or the variant is not supported.
"""

from dataclasses import replace

from neaptide.models.config import VLLM, DecoderConfig, TensorNames, UnsupportedModelError
from neaptide.models.families.decoder import flag, parse_decoder, refuse, with_defaults, within_window
from neaptide.models.fields import RawConfig, number, positive_int

Ends = tuple[int, ...]
"""End-of-sequence tokens."""

_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "relu")
_EPS = {"rms_norm_eps": "layer_norm_eps"}


def gpt2(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """GPT-2: learned positions, stacked and transposed weights."""
    refuse(raw, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    if not flag(raw, "scale_attn_weights", True):
        raise UnsupportedModelError(f"scale_attn_weights false is not supported; {VLLM}")
    raw = _one_kv_head_each(with_defaults(raw, tie_word_embeddings=True, n_inner=4 * positive_int(raw, "n_embd")))
    keys = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    keys |= {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}
    keys |= {"hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
    config = parse_decoder(raw, ends, context_tokens=1024, eps=1e-5, activations=_GELUS, is_rotated=False, keys=keys)
    return replace(
        _whole_heads(config),
        norm="layer",
        norm_bias=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        transposed=True,
        gated=False,
        names=TensorNames(
            prefix="transformer.",
            embedding="wte",
            positions="wpe",
            layers="h",
            final_norm="ln_f",
            attention_norm="ln_1",
            mlp_norm="ln_2",
            qkv=("attn.c_attn",),
            out="attn.c_proj",
            up=("mlp.c_fc",),
            down="mlp.c_proj",
        ),
    )


def _one_kv_head_each(raw: RawConfig) -> RawConfig:
    """The entries without one that the family does not have: each query head has its own keys and values."""
    return raw | {"num_key_value_heads": None}


def _whole_heads(config: DecoderConfig) -> DecoderConfig:
    if config.hidden_size != config.num_heads * config.head_dim:
        raise UnsupportedModelError(
            f"hidden_size {config.hidden_size} is not a multiple of the {config.num_heads} attention heads"
        )
    return config


def opt(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """OPT: learned positions, and norms before attention and feed-forward or on the sums."""
    if not flag(raw, "layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("layer_norm_elementwise_affine false is not supported: norms have weights")
    raw = _one_kv_head_each(with_defaults(raw, tie_word_embeddings=True))
    keys = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
    config = parse_decoder(raw, ends, context_tokens=2048, eps=1e-5, activations=("relu",), is_rotated=False, keys=keys)
    embedded = positive_int(raw, "word_embed_proj_dim", config.hidden_size)
    if embedded != config.hidden_size:
        raise UnsupportedModelError(
            f"word_embed_proj_dim {embedded} is not supported: only hidden_size, {config.hidden_size}"
        )
    is_before, bias = flag(raw, "do_layer_norm_before", True), flag(raw, "enable_bias", True)
    return replace(
        _whole_heads(config),
        norm="layer",
        norm_bias=True,
        norm_place="before" if is_before else "on_sum",
        final_norm=is_before and not raw.get("_remove_final_layer_norm", False),
        position_offset=2,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        gated=False,
        names=TensorNames(
            embedding="decoder.embed_tokens",
            positions="decoder.embed_positions",
            layers="decoder.layers",
            final_norm="decoder.final_layer_norm",
            attention_norm="self_attn_layer_norm",
            attention_out_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            mlp_out_norm="final_layer_norm",
            out="self_attn.out_proj",
            up=("fc1",),
            down="fc2",
        ),
    )


def gpt_neox(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """GPT-NeoX and Pythia: partial rotation, attention and feed-forward in parallel, heads stacked one by one."""
    raw = _one_kv_head_each(raw) | {"partial_rotary_factor": number(raw, "rotary_pct", 0.25)}
    raw = raw | {"rope_theta": number(raw, "rotary_emb_base", 10_000.0)}
    activations = ("gelu", *_GELUS)
    config = parse_decoder(raw, ends, context_tokens=2048, eps=1e-5, activations=activations, keys=_EPS)
    bias = flag(raw, "attention_bias", True)
    return replace(
        _whole_heads(config),
        norm="layer",
        norm_bias=True,
        parallel=flag(raw, "use_parallel_residual", True),
        stacked_by_head=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        gated=False,
        names=TensorNames(
            prefix="gpt_neox.",
            embedding="embed_in",
            final_norm="final_layer_norm",
            head="embed_out",
            qkv=("attention.query_key_value",),
            out="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
        ),
    )


def phi(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Phi-1, Phi-1.5 and Phi-2: partial rotation, attention and feed-forward in parallel on one norm, biases."""
    refuse(raw, "qk_layernorm")
    raw = with_defaults(raw, partial_rotary_factor=0.5)
    config = parse_decoder(raw, ends, context_tokens=2048, eps=1e-5, activations=_GELUS, keys=_EPS)
    return replace(
        config,
        norm="layer",
        norm_bias=True,
        parallel=True,
        shared_norm=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
        names=TensorNames(final_norm="final_layernorm", out="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2"),
    )


def stablelm(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """StableLM: partial rotation, in some checkpoints attention and feed-forward in parallel on one norm."""
    refuse(raw, "qk_layernorm")
    raw = with_defaults(raw, partial_rotary_factor=0.25)
    config = parse_decoder(raw, ends, context_tokens=4096, eps=1e-5, keys=_EPS)
    is_parallel = flag(raw, "use_parallel_residual")
    return replace(
        _whole_heads(config),
        norm="layer",
        norm_bias=True,
        parallel=is_parallel,
        shared_norm=is_parallel,
        qkv_bias=flag(raw, "use_qkv_bias"),
    )


def starcoder2(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """StarCoder2: a feed-forward without a gate, biases, in some checkpoints a sliding window."""
    raw = with_defaults(raw, tie_word_embeddings=True)
    keys, activations = {"rms_norm_eps": "norm_epsilon"}, ("gelu_pytorch_tanh", *_GELUS)
    config = parse_decoder(raw, ends, context_tokens=4096, eps=1e-5, activations=activations, keys=keys)
    bias = flag(raw, "use_bias", True)
    config = replace(
        config,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        gated=False,
        names=TensorNames(up=("mlp.c_fc",), down="mlp.c_proj"),
    )
    if raw.get("sliding_window") is None:
        return config
    return within_window(config, positive_int(raw, "sliding_window"))


def nemotron(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Nemotron and Minitron: norms whose weights are stored less 1, squared ReLU without a gate, partial rotation."""
    raw = with_defaults(raw, partial_rotary_factor=0.5)
    keys = {"rms_norm_eps": "norm_eps"}
    config = parse_decoder(raw, ends, context_tokens=4096, eps=1e-5, activations=("relu2",), keys=keys)
    bias = flag(raw, "attention_bias")
    return replace(
        config,
        norm="layer",
        norm_bias=True,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=flag(raw, "mlp_bias"),
        gated=False,
        names=TensorNames(up=("mlp.up_proj",)),
    )


def cohere(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """Command R and Aya: attention and feed-forward in parallel on one norm, rotated pairs next to each other."""
    refuse(raw, "use_qk_norm")
    raw = with_defaults(raw, rope_theta=5e5, tie_word_embeddings=True)
    config = parse_decoder(raw, ends, context_tokens=8192, eps=1e-5, keys=_EPS)
    bias = flag(raw, "attention_bias")
    return replace(
        config,
        norm="layer",
        parallel=True,
        shared_norm=True,
        adjacent_pairs=True,
        qkv_bias=bias,
        out_bias=bias,
        logit_scale=number(raw, "logit_scale", 0.0625),
    )


def olmo(raw: RawConfig, ends: Ends) -> DecoderConfig:
    """OLMo: norms without weights."""
    refuse(raw, "clip_qkv")
    config = parse_decoder(raw | {"rms_norm_eps": 1e-5}, ends, context_tokens=2048)
    bias = flag(raw, "attention_bias")
    return replace(config, norm="layer", norm_weight=False, qkv_bias=bias, out_bias=bias)
