"""Single slots of all layers, gathered into one piece and scattered back: checkpoints, swaps and moves of blocks."""

from typing import Protocol

import torch
from torch import Tensor

from neaptide.kernels.kv_copy import reference
from neaptide.kernels.launching import takes_triton

__all__ = ["SlotCopier", "slot_copier"]


class SlotCopier(Protocol):
    """See ``reference``; slots outside the cache are not looked for."""

    def gather(self, kv_cache: Tensor, slots: Tensor, /) -> Tensor: ...

    def scatter(self, kv_cache: Tensor, slots: Tensor, copied: Tensor, /) -> None: ...


def slot_copier(device: torch.device, gpu_kernels: str = "auto") -> SlotCopier:
    """By Triton where that is wanted and can be had."""
    if takes_triton(device, gpu_kernels):
        from neaptide.kernels.kv_copy import launch

        return launch
    return reference
