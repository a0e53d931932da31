"""Protocols that every attention implementation satisfies."""

from typing import Protocol

from torch import Tensor

from neaptide.kernels.paged_attention.reference import HasSlots
from neaptide.kernels.paged_attention.tables import IntArray, StepTables


class StepAttention(HasSlots, Protocol):
    """The attention of one step, planned for all layers."""

    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor:
        """The reference's ``paged_attention``."""
        ...


class AttentionPlanner(Protocol):
    """Plans a step's attention. The arguments are those of the reference's ``plan_attention``."""

    def __call__(self, query_lens: IntArray, seq_lens: IntArray, tables: StepTables, /) -> StepAttention: ...
