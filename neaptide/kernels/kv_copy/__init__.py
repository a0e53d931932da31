"""Gathers single KV slots of all layers into one tensor, and scatters them back.

Checkpoints, swaps and block moves use it. Only ``kernel`` and ``launch`` import Triton.
"""

from typing import Protocol

from torch import Tensor

__all__ = ["SlotCopier"]


class SlotCopier(Protocol):
    """Copies KV slots. ``reference`` documents both methods; slot numbers are not checked against the cache."""

    def gather(self, kv_cache: Tensor, slots: Tensor, /) -> Tensor: ...

    def scatter(self, kv_cache: Tensor, slots: Tensor, copied: Tensor, /) -> None: ...
