"""Compute density: seconds of compute per second of memory traffic of a request.

BlendServe (ASPLOS'26), sections 4.1 and 4.2. All closed forms: no device is asked, no time is read.
"""

import math
from collections.abc import Iterable
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
        return _ratio(self.compute_s(input_tokens, output_tokens), self.memory_s(input_tokens, output_tokens))

    def set_density(self, lengths: Iterable[tuple[float, float]], sharing: float = 0.0) -> float:
        """Density of a set of requests (input tokens, output tokens): ``(1 - s) T_comp / T_mem``.

        ``sharing`` is the share s of the compute that common prefixes save. This is the value of a node of the
        resource-aware tree (section 5.1).
        """
        pairs = list(lengths)
        compute_s = sum(self.compute_s(*pair) for pair in pairs)
        return _ratio((1.0 - sharing) * compute_s, sum(self.memory_s(*pair) for pair in pairs))

    def batch_density(self, input_tokens: float, output_tokens: float, kv_memory_bytes: float) -> float:
        """Density of one step whose decodes, of requests of these lengths at all stages, fill the KV memory.

        Section 4.2: ``N = KV-Mem / ((p + d/2) kv)`` decodes and ``N p / d`` prefill tokens for one read of the memory.
        Equals ``density`` without prefill attention.
        """
        decodes, prefill_tokens = chunk_budget(kv_memory_bytes, input_tokens, output_tokens, self.kv_bytes_per_token)
        compute_s = 2.0 * (decodes + prefill_tokens) * self.parameters / self.flops_per_s
        return compute_s / (kv_memory_bytes / self.bytes_per_s)


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, latent_dim: int = 0, value_bytes: int = 2) -> int:
    """KV bytes per token.

    With multi-head attention there are as many KV heads as query heads, with grouped-query attention fewer, with
    multi-query attention one. Multi-head latent attention keeps one latent vector per layer, with the part of the key
    that has the position: ``latent_dim`` values in total.
    """
    of_layer = latent_dim or 2 * kv_heads * head_dim
    return layers * of_layer * value_bytes


def chunk_budget(
    memory_bytes: float, input_tokens: float, output_tokens: float, kv_bytes_per_token: float
) -> tuple[float, float]:
    """Decoding requests and prefill tokens per step of a steady state of equal requests.

    BlendServe, Algorithm 3, steps 2 and 3: a request holds ``p + d/2`` tokens on average. As many are admitted as end,
    so ``p`` prompt tokens come with every ``d`` output tokens. ``output_tokens`` must be positive.

    Returns:
        ``N = M / ((p + d/2) kv)``, decoding requests, and ``C = N p / d``, prefill tokens per step; not rounded.
    """
    decodes = memory_bytes / ((input_tokens + output_tokens / 2.0) * kv_bytes_per_token)
    return decodes, decodes * input_tokens / output_tokens


def optimal_time_s(compute_s: float, memory_s: float, sharing: float = 0.0, overlap_kappa: float = 0.0) -> float:
    """Least time for work of ``compute_s`` and ``memory_s``, if sharing saves the share ``sharing`` of the compute.

    With ``C = (1 - sharing) compute_s``: ``max(C, M) + kappa min(C, M)``. kappa 0 is BlendServe's ``T_o = max((1 - s)
    T_comp, T_mem)``, perfect overlap; kappa 1 is none.
    """
    compute_s *= 1.0 - sharing
    return max(compute_s, memory_s) + overlap_kappa * min(compute_s, memory_s)


def _ratio(compute_s: float, memory_s: float) -> float:
    return compute_s / memory_s if memory_s else math.inf
