"""What a decoder layer computes between its products: norms, gates, rotary positions, writes to the cache."""

import logging

import torch

from neaptide.kernels.launching import takes_triton
from neaptide.kernels.layer_ops.native import DTYPES, NativeLayerOps
from neaptide.kernels.layer_ops.reference import TorchLayerOps
from neaptide.kernels.native import CompileError

__all__ = ["NativeLayerOps", "TorchLayerOps", "layer_ops"]

logger = logging.getLogger(__name__)


def layer_ops(
    dtype: torch.dtype,
    device: torch.device,
    kernels: str = "auto",
    *,
    gpu_kernels: str = "auto",
) -> TorchLayerOps:
    """In C for fp32 and bf16 on a CPU, unless ``kernels`` is ``torch`` or there is no compiler; on a GPU
    rotation and storing by Triton, unless ``gpu_kernels`` is ``torch``."""
    if takes_triton(device, gpu_kernels):
        from neaptide.kernels.layer_ops.fused import FusedLayerOps

        return FusedLayerOps()
    if device.type == "cpu" and dtype in DTYPES and kernels != "torch":
        try:
            return NativeLayerOps()
        except CompileError as error:
            logger.warning("norms and gates run on torch, which is slower: %s", error)
    return TorchLayerOps()
