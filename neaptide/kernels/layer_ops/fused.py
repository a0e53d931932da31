"""Rotation and KV writes in one Triton launch, for steps planned by Triton's attention. Imports Triton."""

from torch import Tensor

from neaptide.kernels.kv_write.launch import write
from neaptide.kernels.layer_ops.reference import TorchLayerOps
from neaptide.kernels.paged_attention.reference import HasSlots
from neaptide.kernels.prefix_attention.attention import PrefixPlan


class FusedLayerOps(TorchLayerOps):
    """Uses torch for everything except rotation and KV writes."""

    def rotate_and_store(self, qkv: Tensor, rotation: Tensor | None, kv_cache: Tensor, plan: HasSlots) -> None:
        assert isinstance(plan, PrefixPlan)
        write(qkv, rotation, kv_cache, plan.places)
