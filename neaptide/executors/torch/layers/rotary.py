"""Rotary position embedding as one complex multiplication.

A Llama checkpoint pairs dimension ``i`` of a head with ``i + head_dim / 2``. The loader interleaves the rows of the
query and key projections (see `models.llama`). A pair is then adjacent in memory and reads as one complex number. Dot
products of queries and keys stay the same, because both are permuted in the same way.
"""

import math

import torch
from torch import Tensor

from neaptide.models.config import LlamaLikeConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponent)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        # Wavelengths beyond the trained context are stretched by `factor`; short ones are unchanged. Those between the
        # two bounds are blended.
        wavelength = 2 * math.pi / inv_freq
        periods = rope.original_max_position_embeddings / wavelength
        blend = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    return inv_freq


class Rotary:
    """Table of unit complex numbers, one row per position."""

    __slots__ = ("table",)

    def __init__(self, config: LlamaLikeConfig, device: torch.device):
        # fp32 on purpose, as in the reference: the angles of far positions depend on rounding.
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
        self.table = torch.polar(torch.ones_like(angles), angles).to(device)  # [positions, head_dim / 2] complex64

    def at(self, positions: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, 1, head_dim / 2] complex64, broadcast over heads."""
        return self.table.index_select(0, positions).unsqueeze(1)
