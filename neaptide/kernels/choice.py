"""Chooses the kernels of a device: Triton on a GPU, C on a CPU with a compiler, else torch.

The choice is made once, after a trial, for attention, layer operations and KV slot copies together. If one of them
fails the trial, torch computes all of them. Linear layers are chosen by measurement, layer by layer, and so is the
attention of long chunks on a CPU.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from neaptide.kernels.kv_copy import SlotCopier
from neaptide.kernels.kv_copy import reference as copies_by_torch
from neaptide.kernels.launching import wants_triton, why_not
from neaptide.kernels.layer_ops import NativeLayerOps, TorchLayerOps
from neaptide.kernels.native import CompileError
from neaptide.kernels.paged_attention import AttentionPlanner, Shape, StepAttention, StepTables, plan_attention
from neaptide.kernels.paged_attention.long_chunks import measured_choice
from neaptide.kernels.paged_attention.native import NativeAttention
from neaptide.kernels.paged_attention.tables import IntArray
from neaptide.kernels.paged_attention.work_list import MAX_ROWS

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """The kernels chosen for one device."""

    kind: str
    """``triton``, ``native`` or ``torch``."""
    shape: Shape
    dtype: torch.dtype
    """Type of activations and KV cache."""
    device: torch.device
    plan_attention: AttentionPlanner
    layer_ops: TorchLayerOps
    slot_copier: SlotCopier
    decodes_per_read: int = 1
    """Decodes that one read of a shared prefix of ``MIN_SHARED_TOKENS`` or more serves."""


def choose_kernels(
    shape: Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cpu_kernels: str = "auto",
    gpu_kernels: str = "auto",
    batch_invariant: bool = False,
    now_s: Callable[[], float] | None = None,
) -> Kernels:
    """Chooses the kernels, after a trial.

    Args:
        shape: attention heads and block size.
        dtype: of activations and KV cache.
        device: of activations and KV cache.
        cpu_kernels: ``auto`` uses the C kernels on a CPU if they compile, ``native`` requires them, ``torch`` never
            uses them.
        gpu_kernels: ``auto`` uses Triton's kernels on a GPU if a trial gives torch's results, ``triton`` requires them,
            ``torch`` never uses them.
        batch_invariant: make a token's bits depend on its own context only. Only the C kernels can do this.
        now_s: a clock, in seconds, to measure long chunks on a CPU with ``auto``. None leaves them to the C kernels.

    Raises:
        ValueError: required kernels are not available. The message is one line.
    """
    if batch_invariant and device.type != "cpu":
        raise ValueError("batch_invariant needs the C kernels, which run on CPUs only")
    if not batch_invariant and wants_triton(device, gpu_kernels):
        try:
            return _by_triton(shape, dtype, device)
        except ValueError as error:
            if gpu_kernels == "triton":
                raise ValueError(f"gpu_kernels = 'triton' is not available: {error}") from error
            _warn_of_torch(error)
    if device.type == "cpu" and cpu_kernels != "torch":
        try:
            measured_by = now_s if cpu_kernels == "auto" and not batch_invariant else None
            return _in_c(shape, dtype, device, measured_by, batch_invariant=batch_invariant)
        except CompileError as error:
            if batch_invariant:
                raise ValueError(f"batch_invariant needs the C kernels: {error}") from error
            if cpu_kernels == "native":
                raise ValueError(f"cpu_kernels = 'native' is not available: {error}") from error
            _warn_of_torch(error)
    if batch_invariant:
        raise ValueError("batch_invariant needs the C kernels: cpu_kernels must not be 'torch'")
    return _by_torch(shape, dtype, device)


def _warn_of_torch(error: Exception) -> None:
    logger.warning("attention and layer operations run on torch, which is slower: %s", error)


def _by_triton(shape: Shape, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Triton's kernels.

    Raises:
        ValueError: they are not available, or do not give torch's results.
    """
    if reason := why_not(device):
        raise ValueError(reason)
    from neaptide.kernels.kv_copy import launch
    from neaptide.kernels.layer_ops.fused import FusedLayerOps
    from neaptide.kernels.prefix_attention.attention import PrefixAttention
    from neaptide.kernels.prefix_attention.trial import try_kernels

    attention = PrefixAttention(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, shape.block_size, device)
    try_kernels(attention)
    most = attention.tiles.wide_rows // attention.group
    return Kernels("triton", shape, dtype, device, attention.plan, FusedLayerOps(), launch, most)


def _in_c(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    measured_by: Callable[[], float] | None,
    *,
    batch_invariant: bool,
) -> Kernels:
    """The C kernels.

    Raises:
        CompileError: they do not compile here, or do not support these heads.
    """
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    attention = NativeAttention(*heads, dtype, shape.block_size, batch_invariant=batch_invariant)
    if measured_by is not None:

        def in_c(few: Shape) -> AttentionPlanner:
            return NativeAttention(few.num_heads, few.num_kv_heads, few.head_dim, dtype, few.block_size).plan

        attention.torch_chunks = measured_choice(shape, dtype, in_c, measured_by)
    most = 1 if batch_invariant else MAX_ROWS // (shape.num_heads // shape.num_kv_heads)
    return Kernels("native", shape, dtype, device, attention.plan, NativeLayerOps(), copies_by_torch, most)


def _by_torch(shape: Shape, dtype: torch.dtype, device: torch.device) -> Kernels:
    def plan(query_lens: IntArray, seq_lens: IntArray, tables: StepTables, /) -> StepAttention:
        return plan_attention(query_lens, seq_lens, tables, shape.block_size, dtype=dtype, device=device)

    return Kernels("torch", shape, dtype, device, plan, TorchLayerOps(), copies_by_torch)
