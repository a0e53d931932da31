"""Rows as 8-bit numbers, in torch."""

from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 255
LEAST_SCALE = 1e-30
"""Of a row of zeros: its inverse is a number."""


class Quantized(NamedTuple):
    """``x ~ scales * (numbers - zeros)``, row by row."""

    numbers: Tensor
    """[at least rows, size] uint8; what rows behind those of x hold means nothing."""
    scales: Tensor
    """[rows] fp32; no number where a row has one that is none."""
    zeros: Tensor
    """[rows] fp32, whole numbers from 0 to 255: what stands for zero, which is exact."""


class RowQuantizer:
    """For any float type on a CPU."""

    def quantize(self, x: Tensor, num_rows: int) -> Quantized:
        """[rows, size] as 8-bit numbers, with memory for ``num_rows`` rows."""
        rows = x.shape[0]
        values = x.float()
        low, high = values.aminmax(dim=-1, keepdim=True)  # [rows, 1]
        low, high = low.clamp_max_(0.0), high.clamp_min_(0.0)
        scales = (high - low).mul_(1.0 / LEVELS).clamp_min_(LEAST_SCALE)
        inverse = scales.reciprocal()
        zeros = (-low * inverse).round_()
        numbers = torch.empty(num_rows, x.shape[1], dtype=torch.uint8)
        rounded = (values * inverse).round_().add_(zeros).clamp_(0, LEVELS)
        numbers[:rows] = rounded.nan_to_num_(0.0)
        scales[~torch.isfinite(high - low)] = torch.nan
        return Quantized(numbers, scales.flatten(), zeros.flatten())

    def restore(
        self, sums: Tensor, quantized: Quantized, of_ones: Tensor, bias: Tensor | None, out: Tensor, *, adds: bool
    ) -> None:
        """Writes ``scales * (sums - zeros * of_ones) + bias`` to ``out``, or adds it.

        Args:
            sums: [at least rows, outputs] fp32: products of the numbers with a weight.
            quantized: what they are products of.
            of_ones: [outputs] fp32: what a row of ones makes of the weight.
            bias: [outputs] fp32.
            out: [rows, outputs] of any float type.
            adds: to what is there.
        """
        values = sums[: out.shape[0]].addr(quantized.zeros, of_ones, alpha=-1.0).mul_(quantized.scales.unsqueeze(1))
        if bias is not None:
            values += bias
        if adds:
            out += values
        else:
            out.copy_(values)
