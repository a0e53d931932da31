"""What computes here: on a GPU Triton's kernels, on a CPU those in C where they can be compiled, else torch.

Decided once, after a trial, for attention, for what lies between a layer's products and for copies of slots together:
what was found not to work computes none of them. Products are chosen by measurement, layer by layer.
"""

import logging
from typing import NamedTuple

import torch

from neaptide.kernels.kv_copy import SlotCopier
from neaptide.kernels.kv_copy import reference as copies_by_torch
from neaptide.kernels.launching import wants_triton, why_not
from neaptide.kernels.layer_ops import NativeLayerOps, TorchLayerOps
from neaptide.kernels.native import CompileError
from neaptide.kernels.paged_attention import AttentionPlanner, StepAttention, StepTables, plan_attention
from neaptide.kernels.paged_attention.native import NativeAttention
from neaptide.kernels.paged_attention.tables import IntArray

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Of heads and of the blocks that they are kept in."""

    num_heads: int
    """Of queries."""
    num_kv_heads: int
    """Of keys and values."""
    head_dim: int
    """Of both."""
    block_size: int
    """Tokens."""


class Kernels(NamedTuple):
    """What computes on one device."""

    kind: str
    """``triton``, ``native`` or ``torch``."""
    shape: Shape
    dtype: torch.dtype
    """Of activations and cache."""
    device: torch.device
    plan_attention: AttentionPlanner
    layer_ops: TorchLayerOps
    slot_copier: SlotCopier


def choose_kernels(
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cpu_kernels: str = "auto",
    gpu_kernels: str = "auto",
    batch_invariant: bool = False,
) -> Kernels:
    """
    Args:
        shape: of the model's attention and of the cache.
        dtype: of activations and cache.
        device: of both.
        cpu_kernels: ``auto`` takes the kernels in C on a CPU where they can be compiled, ``native`` insists on them,
            ``torch`` does without.
        gpu_kernels: ``auto`` takes Triton's kernels on a GPU once they have computed there what torch computes,
            ``triton`` insists on them, ``torch`` does without.
        batch_invariant: a token's bits depend on its own context only; only the kernels in C can.

    Raises:
        ValueError: kernels were insisted on that cannot be had; one line.
    """
    if batch_invariant and device.type != "cpu":
        raise ValueError("batch_invariant needs the kernels in C, which are for CPUs")
    if not batch_invariant and wants_triton(device, gpu_kernels):
        try:
            return _by_triton(shape, dtype, device)
        except ValueError as error:
            if gpu_kernels == "triton":
                raise ValueError(f"gpu_kernels = 'triton' cannot be had: {error}") from error
            _warn_of_torch(error)
    if device.type == "cpu" and cpu_kernels != "torch":
        try:
            return _in_c(shape, dtype, device, batch_invariant=batch_invariant)
        except CompileError as error:
            if batch_invariant:
                raise ValueError(f"batch_invariant needs the kernels in C: {error}") from error
            if cpu_kernels == "native":
                raise ValueError(f"cpu_kernels = 'native' cannot be had: {error}") from error
            _warn_of_torch(error)
    if batch_invariant:
        raise ValueError("batch_invariant needs the kernels in C: cpu_kernels = 'torch' does without")
    return _by_torch(shape, dtype, device)


def _warn_of_torch(error: Exception) -> None:
    logger.warning("attention and what lies between products run on torch, which is slower: %s", error)


def _by_triton(shape: Shape, dtype: torch.dtype, device: torch.device) -> Kernels:
    """
    Raises:
        ValueError: they cannot be had, or compute something else than torch.
    """
    if reason := why_not(device):
        raise ValueError(reason)
    from neaptide.kernels.kv_copy import launch
    from neaptide.kernels.layer_ops.fused import FusedLayerOps
    from neaptide.kernels.prefix_attention.attention import PrefixAttention
    from neaptide.kernels.prefix_attention.trial import try_kernels

    attention = PrefixAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, shape.block_size, device)
    try_kernels(attention)
    return Kernels("triton", shape, dtype, device, attention.plan, FusedLayerOps(), launch)


def _in_c(shape: Shape, dtype: torch.dtype, device: torch.device, *, batch_invariant: bool) -> Kernels:
    """
    Raises:
        CompileError: they cannot be compiled here, or not for such heads.
    """
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attention = NativeAttention(*heads, dtype, shape.block_size, batch_invariant=batch_invariant)
    return Kernels("native", shape, dtype, device, attention.plan, NativeLayerOps(), copies_by_torch)


def _by_torch(shape: Shape, dtype: torch.dtype, device: torch.device) -> Kernels:
    def plan(query_lens: IntArray, seq_lens: IntArray, tables: StepTables, /) -> StepAttention:
        return plan_attention(query_lens, seq_lens, tables, shape.block_size, dtype=dtype, device=device)

    return Kernels("torch", shape, dtype, device, plan, TorchLayerOps(), copies_by_torch)
