"""Facts about a model that are needed before its weights are loaded. Does not import torch: both processes read it."""

from dataclasses import dataclass


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message is one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the server and the engine need to know of a model of any architecture."""

    vocab_size: int
    max_position_embeddings: int
    """Longest context of the model, prompt and output, in tokens."""
    eos_token_ids: tuple[int, ...]
    """From generation_config.json if it names them, else from config.json."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base and, for scaled types, how frequencies are stretched."""

    rope_type: str
    """``default``, ``linear`` or ``llama3``."""
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


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

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLikeConfig(ModelConfig):
    """A decoder like Llama's: RMS norms, rotary positions, grouped-query attention, gated SiLU."""

    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    out_bias: bool
    """Bias of the projection after the attention."""
    mlp_bias: bool
