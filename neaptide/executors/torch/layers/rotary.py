"""Rotary position embedding as one complex multiplication.

A Llama checkpoint pairs dimension ``i`` of a head with ``i + head_dim / 2``. The loader interleaves the rows of the
query and key projections (see `models.decoder`). A pair is then adjacent in memory and reads as one complex number. Dot
products of queries and keys stay the same, because both are permuted in the same way.
"""

import math

import torch
from torch import Tensor

from neaptide.models.config import DecoderConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, context_tokens: int) -> Tensor:
    """Radians per position of each pair, [rotary_dim / 2] fp32.

    They are the same for all positions: cached keys could not follow a change. So kinds that depend on the length take
    the longest context that is served, as in vLLM.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    is_stretched = context_tokens > rope.original_max_position_embeddings
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.long_factors if is_stretched else rope.short_factors, dtype=torch.float32)
        return torch.reciprocal(factors * rope.theta**exponent)
    if rope.rope_type == "dynamic" and is_stretched:
        longest = rope.factor * rope.factor - (rope.factor - 1)
        theta = rope.theta * longest ** (rotary_dim / max(rotary_dim - 2, 1))
        return torch.reciprocal(theta**exponent)
    inv_freq = 1.0 / (rope.theta**exponent)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "yarn":
        kept = _kept(rope, rotary_dim)
        return inv_freq / rope.factor * (1 - kept) + inv_freq * kept
    if rope.rope_type == "llama3":
        # Wavelengths beyond the trained context are stretched by `factor`; short ones are unchanged. Those between the
        # two bounds are blended.
        wavelength = 2 * math.pi / inv_freq
        periods = rope.original_max_position_embeddings / wavelength
        blend = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    return inv_freq


def _kept(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Share of each frequency that is not stretched (yarn), [rotary_dim / 2]."""

    def dimension(rotations: float) -> float:
        wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


class Rotary:
    """Table of complex numbers, one row per position. Pairs behind the rotated dimensions are not turned."""

    __slots__ = ("table",)

    def __init__(self, config: DecoderConfig, rope: RopeConfig, device: torch.device):
        # fp32 on purpose, as in the reference: the angles of far positions depend on rounding.
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        context_tokens = config.max_position_embeddings
        angles = torch.outer(positions, inverse_frequencies(rope, config.rotary_dim, context_tokens))
        table = torch.polar(torch.full_like(angles, rope.attention_factor), angles)
        rest = torch.ones(context_tokens, (config.head_dim - config.rotary_dim) // 2, dtype=table.dtype)
        table = torch.cat([table, rest], dim=1)
        self.table = (table * _scale(config)).to(device)  # [positions, head_dim / 2] complex64

    def at(self, positions: Tensor) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, 1, head_dim / 2] complex64, broadcast over heads."""
        return self.table.index_select(0, positions).unsqueeze(1)


def _scale(config: DecoderConfig) -> float:
    """Factor on queries and keys that gives their products the model's scale: kernels use ``1 / sqrt(head_dim)``."""
    if config.attention_scale is None:
        return 1.0
    return math.sqrt(config.attention_scale * math.sqrt(config.head_dim))
