"""Layer operations next to the linear layers: norms, gates, rotary embedding, KV writes.

Only ``fused`` imports Triton.
"""

from neaptide.kernels.layer_ops.native import NativeLayerOps
from neaptide.kernels.layer_ops.reference import TorchLayerOps

__all__ = ["NativeLayerOps", "TorchLayerOps"]
