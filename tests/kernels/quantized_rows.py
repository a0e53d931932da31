"""Rows as 8-bit numbers in torch, bit for bit as the C product quantizes them."""

from typing import NamedTuple

import torch
from torch import Tensor


class QuantizedRows(NamedTuple):
    """``x ~ scales * (numbers - zeros)``, row by row."""

    numbers: Tensor
    """[rows, size] int64, 0 to 255."""
    scales: Tensor
    """[rows] fp32."""
    zeros: Tensor
    """[rows] int64, 0 to 255."""


def quantize_rows(x: Tensor) -> QuantizedRows:
    """[rows, size] of finite numbers. float64 products are exact, as in C, where they are fused with the rounding."""
    low, high = x.float().aminmax(dim=-1, keepdim=True)
    low, high = low.clamp_max(0.0), high.clamp_min(0.0)
    scales = ((high - low) * torch.tensor(1.0 / 255.0)).clamp_min(1e-30)
    inverse = scales.reciprocal().double()
    zeros = (-low.double() * inverse).round()
    numbers = ((x.double() * inverse).round() + zeros).clamp(0, 255)
    return QuantizedRows(numbers.long(), scales.flatten(), zeros.flatten().long())
