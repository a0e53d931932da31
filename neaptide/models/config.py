"""Facts about a model that are needed before its weights are loaded. Does not import torch: both processes read it."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message is one line that says why."""


class ModelUnavailableError(UnsupportedModelError):
    """The model cannot be downloaded now; a later try may succeed."""


VLLM = "--executor vllm serves more models"
"""End of the message if our own executor lacks something that vLLM has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the server and the engine need to know of a model of any architecture."""

    vocab_size: int
    max_position_embeddings: int
    """Longest context of the model, prompt and output, in tokens."""
    eos_token_ids: tuple[int, ...]
    """From config.json and generation_config.json; see ``server.text.ends`` for other sources."""
    default_context_tokens: int = 0
    """Context that is served unless a setting names one; 0 for the longest."""

    @property
    def served_context_tokens(self) -> int:
        """Context without a setting."""
        return self.default_context_tokens or self.max_position_embeddings

    def ending(self, eos_token_ids: tuple[int, ...] | None) -> Self:
        """The same model with these end tokens; None changes nothing."""
        return self if eos_token_ids is None else replace(self, eos_token_ids=eos_token_ids)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base and, for scaled types, how frequencies are stretched."""

    rope_type: str
    """``default``, ``linear``, ``dynamic``, ``yarn``, ``longrope`` or ``llama3``."""
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """Context of the training before the frequencies were stretched."""
    attention_factor: float = 1.0
    """Factor on rotated queries and keys."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Rotations over the original context, above which a frequency is kept and below which it is stretched (yarn)."""
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """Stretch of each frequency, for contexts up to the original one and for longer ones (longrope)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelFacts):
    """Shape of a dense decoder, as far as the rest of the program needs it."""

    architecture: str
    """Its name in ``neaptide.models.registry``."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    dtype: str
    """The checkpoint's dtype: ``float32``, ``bfloat16`` or ``float16``."""

    def served(self, max_model_len: int, eos_token_ids: tuple[int, ...] | None) -> Self:
        """The model as it is served.

        Args:
            max_model_len: most tokens of a request; 0 for the model's own default.
            eos_token_ids: tokens that end an output; None for the model's own.
        """
        return self.ending(eos_token_ids)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


class TensorNames(NamedTuple):
    """Names of a decoder's tensors in its checkpoint, without ``.weight`` and ``.bias``."""

    prefix: str = "model."
    """Beginning of the names, but not of the output projection's. Checkpoints without a projection may lack it."""
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    """Table of learned positions."""
    layers: str = "layers"
    final_norm: str = "norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values; a single name if the checkpoint stacks them."""
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up projection; a single name if the checkpoint stacks them or has no gate."""
    down: str = "mlp.down_proj"


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """What the layers of a dense decoder are made of. The defaults are Llama's."""

    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    norm_offset: float = 0.0
    """Added to the norms' weights when they are loaded."""
    norm_place: Literal["before", "after", "both", "on_sum"] = "before"
    """Place of a norm: before attention and feed-forward, after them, or on the sum with the residual stream."""
    final_norm: bool = True
    parallel: bool = False
    """Attention and feed-forward read the same residual stream."""
    shared_norm: bool = False
    """In a parallel layer, both read the same norm."""

    rope: RopeConfig | None
    """None for learned positions."""
    rotary_dim: int = 0
    """Number of the first dimensions of a head that are rotated."""
    adjacent_pairs: bool = False
    """The checkpoint has rotated pairs next to each other, not in two halves."""
    unrotated_layers: frozenset[int] = frozenset()
    position_offset: int = 0
    """Rows of the table of learned positions before position 0."""

    qkv_bias: bool = False
    out_bias: bool = False
    """Bias of the projection after the attention."""
    mlp_bias: bool = False
    head_bias: bool = False
    """Bias of the output projection."""
    stacked_by_head: bool = False
    """Stacked queries, keys and values alternate head by head."""
    transposed: bool = False
    """The checkpoint's linear weights are [in_features, out_features]."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMS norm of queries and keys: of each head, or of all heads together."""
    qk_norm_after_rotation: bool = False

    activation: str = "silu"
    gated: bool = True
    """The feed-forward multiplies the activation with another projection."""

    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Factor on the products of queries and keys; None for ``1 / sqrt(head_dim)``. The rotation applies it, so it needs
    a rotation in every layer."""
    residual_scale: float = 1.0
    """Factor on what attention and feed-forward add to the residual stream."""
    logit_scale: float = 1.0

    names: TensorNames = LLAMA_NAMES

    def served(self, max_model_len: int, eos_token_ids: tuple[int, ...] | None) -> Self:
        model = self.ending(eos_token_ids)
        if self.rope is None:
            return model
        served_tokens = min(max_model_len or self.served_context_tokens, self.max_position_embeddings)
        return replace(model, max_position_embeddings=served_tokens)
