"""Row quantization in torch."""

from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 255
LEAST_SCALE = 1e-30
"""Scale of a row of zeros: small, but its inverse is finite."""


class Quantized(NamedTuple):
    """``x ~ scales * (numbers - zeros)``, row by row."""

    numbers: Tensor
    """[at least rows, size] uint8; rows after those of x are undefined."""
    scales: Tensor
    """[rows] fp32; NaN for a row with a number that is not finite."""
    zeros: Tensor
    """[rows] fp32, whole numbers from 0 to 255: the zero point, which represents 0 exactly."""


class RowQuantizer:
    """Row quantization for any float type on a CPU."""

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
            quantized: the quantized rows.
            of_ones: [outputs] fp32: product of a row of ones with the weight.
            bias: [outputs] fp32.
            out: [rows, outputs] of any float type.
            adds: add to ``out`` instead of overwriting it.
        """
        values = sums[: out.shape[0]].addr(quantized.zeros, of_ones, alpha=-1.0).mul_(quantized.scales.unsqueeze(1))
        if bias is not None:
            values += bias
        if adds:
            out += values
        else:
            out.copy_(values)
