"""Normalisation over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from neaptide.kernels.layer_ops import TorchLayerOps


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""

    __slots__ = ("_ops", "bias", "eps", "weight")

    def __init__(self, size: int, eps: float, ops: TorchLayerOps, *, dtype: torch.dtype, device: torch.device):
        self._ops, self.bias = ops, None
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, size] -> the same."""
        return self._ops.rms_norm(x, self.weight, self.eps)


class LayerNorm:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension; torch does it in one pass."""

    __slots__ = ("bias", "eps", "size", "weight")

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_weight: bool = True,
        has_bias: bool = True,
    ):
        self.size, self.eps = (size,), eps
        self.weight = torch.empty(size, dtype=dtype, device=device) if has_weight else None
        self.bias = torch.empty(size, dtype=dtype, device=device) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, size] -> the same."""
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)
