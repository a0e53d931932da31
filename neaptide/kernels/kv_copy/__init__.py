"""Single slots of all layers, gathered into one piece and scattered back: checkpoints, swaps and moves of blocks. Only
``kernel`` and ``launch`` import Triton."""

from typing import Protocol

from torch import Tensor

__all__ = ["SlotCopier"]


class SlotCopier(Protocol):
    """See ``reference``; slots outside the cache are not looked for."""

    def gather(self, kv_cache: Tensor, slots: Tensor, /) -> Tensor: ...

    def scatter(self, kv_cache: Tensor, slots: Tensor, copied: Tensor, /) -> None: ...
