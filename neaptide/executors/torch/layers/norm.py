"""Root-mean-square normalisation."""

import torch
from torch import Tensor

from neaptide.kernels.layer_ops import TorchLayerOps


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""

    __slots__ = ("_ops", "eps", "weight")

    def __init__(self, size: int, eps: float, ops: TorchLayerOps, *, dtype: torch.dtype, device: torch.device):
        self._ops = ops
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, size] -> the same."""
        return self._ops.rms_norm(x, self.weight, self.eps)
