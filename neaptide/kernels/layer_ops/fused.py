"""Rotation and storing in one launch of Triton's kernel, for steps that its attention has planned; imports Triton."""

from torch import Tensor

from neaptide.kernels.kv_write.launch import write
from neaptide.kernels.layer_ops.reference import TorchLayerOps
from neaptide.kernels.paged_attention.reference import HasSlots
from neaptide.kernels.prefix_attention.attention import PrefixPlan


class FusedLayerOps(TorchLayerOps):
    """All else is torch's."""

    def rotate_and_store(self, qkv: Tensor, rotation: Tensor, kv_cache: Tensor, plan: HasSlots) -> None:
        assert isinstance(plan, PrefixPlan)
        write(qkv, rotation, kv_cache, plan.places)
