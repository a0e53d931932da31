"""Compute density: seconds of compute per second of memory traffic of a request.

BlendServe (ASPLOS'26), sections 4.1 and 4.2. All closed forms: no device is asked, no time is read.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

from neaptide.engine.arrays import FloatArray

Tokens = TypeVar("Tokens", float, FloatArray)
"""Token count of one request, or an array of counts."""


@dataclass(slots=True, frozen=True)
class DensityModel:
    """Cost parameters of a model on a device."""

    parameters: float
    flops_per_s: float
    bytes_per_s: float
    """Memory bandwidth of the device."""
    kv_bytes_per_token: float
    """All layers, key and value: ``H_kv * L * 4`` in 16-bit."""
    attention_flops_per_pair: float = 0.0
    """Prefill attention per (query, key) pair: ``4 * H * L``. The paper defines it and then omits it (0), as it is
    small for prompts of a few hundred tokens. It counts all p^2 pairs; a causal kernel computes half."""
    tile_tokens: int = 1
    """Tile size: where prompts are paced, the token count of a step should be a multiple of it."""

    @classmethod
    def in_seconds(cls, token_s: float, kv_token_s: float, pair_s: float = 0.0, tile_tokens: int = 1) -> "DensityModel":
        """Model from a device profile's times for one token's matrix products, one cached token's read, and one pair.

        A causal kernel computes half of the (query, key) pairs.
        """
        return cls(token_s / 2.0, 1.0, 1.0, kv_token_s, pair_s / 2.0, tile_tokens)

    def compute_s(self, input_tokens: Tokens, output_tokens: Tokens) -> Tokens:
        """``Comp(r) = (2 (p + d) P + 4 p^2 H L) / compute``."""
        projections = 2.0 * (input_tokens + output_tokens) * self.parameters
        attention = self.attention_flops_per_pair * input_tokens**2
        return (projections + attention) / self.flops_per_s

    def memory_s(self, input_tokens: Tokens, output_tokens: Tokens) -> Tokens:
        """``Mem(r) = (p d + d^2 / 2) H_kv L 4 / bandwidth``: the KV cache that all decode steps read."""
        read_tokens = input_tokens * output_tokens + output_tokens**2 / 2.0
        return read_tokens * self.kv_bytes_per_token / self.bytes_per_s

    def density(self, input_tokens: float, output_tokens: float) -> float:
        """``rho(r) = Comp(r) / Mem(r)``; infinite without output, which reads no cache."""
        memory_s = self.memory_s(input_tokens, output_tokens)
        return self.compute_s(input_tokens, output_tokens) / memory_s if memory_s else math.inf


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, latent_dim: int = 0, value_bytes: int = 2) -> int:
    """KV bytes per token.

    With multi-head attention there are as many KV heads as query heads, with grouped-query attention fewer, with
    multi-query attention one. Multi-head latent attention keeps one latent vector per layer, with the part of the key
    that has the position: ``latent_dim`` values in total.
    """
    of_layer = latent_dim or 2 * kv_heads * head_dim
    return layers * of_layer * value_bytes
