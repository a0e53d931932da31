"""Which implementation attends: on a GPU Triton's kernel, on a CPU that in C where it can be compiled, else torch."""

import logging
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neaptide.kernels.launching import wants_triton, why_not
from neaptide.kernels.native import CompileError
from neaptide.kernels.paged_attention.native import NativeAttention
from neaptide.kernels.paged_attention.reference import HasSlots, plan_attention
from neaptide.kernels.paged_attention.tables import IntArray, StepTables

logger = logging.getLogger(__name__)


class StepAttention(HasSlots, Protocol):
    """The attention of one step, planned for all layers."""

    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor:
        """As the reference's ``paged_attention``."""
        ...


class AttentionPlanner(Protocol):
    """Plans a step's attention; arguments as of the reference's ``plan_attention``."""

    def __call__(self, query_lens: IntArray, seq_lens: IntArray, tables: StepTables, /) -> StepAttention: ...


class ChosenPlanner(NamedTuple):
    """A planner, and what computes what it plans."""

    kernels: str
    """``triton``, ``native`` or ``torch``."""
    plan: AttentionPlanner

    def __call__(self, query_lens: IntArray, seq_lens: IntArray, tables: StepTables, /) -> StepAttention:
        return self.plan(query_lens, seq_lens, tables)


def attention_planner(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str = "auto",
    gpu_kernels: str = "auto",
    batch_invariant: bool = False,
) -> ChosenPlanner:
    """
    Args:
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: of both.
        block_size: tokens per block.
        dtype: of queries and cache.
        device: of both.
        kernels: ``auto`` takes the C kernel on a CPU where it can be compiled, ``native`` insists on it, ``torch``
            does without.
        gpu_kernels: ``auto`` takes Triton's kernel on a GPU once it has computed there what torch computes, ``triton``
            insists on it, ``torch`` does without.
        batch_invariant: a token's bits depend on its own context only; only the C kernel can.

    Raises:
        ValueError: a kernel was insisted on and cannot be had.
    """
    if not batch_invariant and wants_triton(device, gpu_kernels):
        try:
            plan_by_triton = _triton_planner(num_heads, num_kv_heads, head_dim, block_size, dtype, device)
            return ChosenPlanner("triton", plan_by_triton)
        except ValueError as error:
            if gpu_kernels == "triton":
                raise ValueError(f"gpu_kernels = 'triton' cannot be had: {error}") from error
            logger.warning("attention runs on torch, which is slower: %s", error)
    if device.type == "cpu" and kernels != "torch":
        try:
            native = NativeAttention(
                num_heads, num_kv_heads, head_dim, dtype, block_size, batch_invariant=batch_invariant
            )
            return ChosenPlanner("native", native.plan)
        except CompileError as error:
            if batch_invariant:
                raise ValueError(f"batch_invariant needs the attention in C: {error}") from error
            if kernels == "native":
                raise ValueError(f"cpu_kernels = 'native' cannot be had: {error}") from error
            logger.warning("attention runs on torch, which is slower: %s", error)
    if batch_invariant:
        raise ValueError("batch_invariant needs the attention in C, which is for CPUs")

    def plan(query_lens: IntArray, seq_lens: IntArray, tables: StepTables, /) -> StepAttention:
        return plan_attention(query_lens, seq_lens, tables, block_size, dtype=dtype, device=device)

    return ChosenPlanner("torch", plan)


def _triton_planner(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionPlanner:
    """
    Raises:
        ValueError: it cannot be had, or computes something else than torch.
    """
    if reason := why_not(device):
        raise ValueError(reason)
    from neaptide.kernels.prefix_attention.attention import PrefixAttention
    from neaptide.kernels.prefix_attention.trial import try_attention

    kernel = PrefixAttention(num_heads, num_kv_heads, head_dim, dtype, block_size, device)
    try_attention(kernel)
    return kernel.plan
