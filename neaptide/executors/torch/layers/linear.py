"""Linear layers over a flat batch of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

_PADDED_ROWS = range(8, 16)
"""On a CPU (fp32, one thread) products of so many rows take up to 1.5 times as long as those of 16."""


class Linear:
    """``y = x W^T + b``; several projections of the same input are stacked in one weight."""

    __slots__ = ("bias", "weight")

    def __init__(self, out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        rows = x.shape[0]
        if rows in _PADDED_ROWS and x.device.type == "cpu":
            x = F.pad(x, (0, 0, 0, _PADDED_ROWS.stop - rows))
        return F.linear(x, self.weight, self.bias)[:rows]

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += x W^T + b`` in place: the sum rides along in the matrix product."""
        if x.shape[0] in _PADDED_ROWS and x.device.type == "cpu":
            residual.add_(self(x))
            return
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)
