"""What a decoder layer computes between its products: norms, gates, rotary positions, writes to the cache. Only
``fused`` imports Triton."""

from neaptide.kernels.layer_ops.native import NativeLayerOps
from neaptide.kernels.layer_ops.reference import TorchLayerOps

__all__ = ["NativeLayerOps", "TorchLayerOps"]
