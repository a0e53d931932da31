"""Linear layers with weights packed once."""

from neaptide.kernels.linear.native import PackedLinear

__all__ = ["PackedLinear"]
