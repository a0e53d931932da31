"""What every attention implementation is given, and the protocols that it satisfies."""

from typing import NamedTuple, Protocol

from torch import Tensor

from neaptide.kernels.paged_attention.reference import HasSlots
from neaptide.kernels.paged_attention.tables import IntArray, StepTables


class Shape(NamedTuple):
    """Attention heads, and the KV cache blocks that store them."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key heads, and as many value heads."""
    head_dim: int
    """Size of every head."""
    block_size: int
    """Tokens per block."""


class StepAttention(HasSlots, Protocol):
    """The attention of one step, planned for all layers."""

    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor:
        """The reference's ``paged_attention``."""
        ...


class AttentionPlanner(Protocol):
    """Plans a step's attention. The arguments are those of the reference's ``plan_attention``."""

    def __call__(self, query_lens: IntArray, seq_lens: IntArray, tables: StepTables, /) -> StepAttention: ...
