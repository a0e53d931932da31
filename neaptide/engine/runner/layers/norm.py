"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device):
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, size] -> the same."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
