"""Facts about a model that are needed before its weights are loaded. Does not import torch: both processes read it."""

from dataclasses import dataclass, replace
from typing import Self


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message is one line that says why."""


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
    """Shape of a dense decoder, as far as all families share it. Families add their own fields."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLikeConfig(ModelConfig):
    """A decoder like Llama's: RMS norms, rotary positions, grouped-query attention, gated SiLU."""

    rms_norm_eps: float
    rope: RopeConfig
    rotary_dim: int
    """Number of the first dimensions of a head that are rotated."""
    qkv_bias: bool
    out_bias: bool
    """Bias of the projection after the attention."""
    mlp_bias: bool

    def served(self, max_model_len: int, eos_token_ids: tuple[int, ...] | None) -> Self:
        served_tokens = min(max_model_len or self.served_context_tokens, self.max_position_embeddings)
        return replace(self.ending(eos_token_ids), max_position_embeddings=served_tokens)
