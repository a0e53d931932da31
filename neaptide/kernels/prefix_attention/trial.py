"""Tries Triton's kernels on the device before a server uses them.

They are compiled on each device by the software installed there, and our own tests cover only some of those.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from neaptide.kernels.kv_copy import launch
from neaptide.kernels.kv_copy import reference as copies_by_torch
from neaptide.kernels.layer_ops.fused import FusedLayerOps
from neaptide.kernels.layer_ops.reference import TorchLayerOps
from neaptide.kernels.paged_attention.reference import plan_attention
from neaptide.kernels.paged_attention.tables import IntArray, StepTables
from neaptide.kernels.prefix_attention.attention import PrefixAttention

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_QUERY_LENS = (1, 1, 1, 3, 70)
_CONTEXT_LENS = (330, 331, 130, 97, 19)
"""Four requests share a prefix, one context is split, one chunk joins the prefix and one does not."""
_SHARED_TOKENS = 64
_COPIED_SLOTS = 5


def try_kernels(kernel: PrefixAttention) -> None:
    """Compares the kernels with torch: copies of slots in two layers, and a layer's attention for five requests.

    Raises:
        ValueError: a kernel does not compile, does not run, or gives other results. The message is one line.
    """
    try:
        for what, off_by in _differences(kernel):
            if not off_by <= _TOLERANCES[kernel.dtype]:
                raise _DiffersError(f"{what} is off by {off_by:.2g}")
    except _DiffersError as error:
        raise ValueError(f"Triton's kernels give other results than torch on this device: {error}") from None
    except Exception as error:  # compilers raise errors of any kind; torch can compute instead
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"Triton's kernels fail on this device: {type(error).__name__}: {first_line}") from error


class _DiffersError(Exception):
    pass


class _Step(NamedTuple):
    query_lens: IntArray
    seq_lens: IntArray
    tables: StepTables
    num_blocks: int


def _make_step(block_size: int) -> _Step:
    query_lens = np.array(_QUERY_LENS)
    seq_lens = query_lens + np.array(_CONTEXT_LENS)
    rng = np.random.default_rng(0)
    num_blocks = -(-seq_lens // block_size)
    ids = rng.permutation(int(num_blocks.sum()))
    padded = np.zeros((len(seq_lens), int(num_blocks.max())), np.int64)
    for row, (first, count) in enumerate(zip(np.cumsum(num_blocks) - num_blocks, num_blocks, strict=True)):
        padded[row, :count] = ids[first : first + count]
    padded[1:4, : _SHARED_TOKENS // block_size] = padded[0, : _SHARED_TOKENS // block_size]
    return _Step(query_lens, seq_lens, StepTables.of(padded, rng.random(len(ids))[padded] < 0.5), len(ids))


def _differences(kernel: PrefixAttention) -> Iterator[tuple[str, float]]:
    """Each operation with its distance from torch's result; NaN if there is a NaN."""
    device, dtype, size = kernel.device, kernel.dtype, kernel.block_size
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    step, stored = _make_step(size), 2 * kernel.num_kv_heads
    caches = normal(2, step.num_blocks, size, stored, kernel.head_dim).to(dtype)
    every_slot = caches.flatten(1, 2)
    slots = torch.randperm(every_slot.shape[1], generator=generator, device=device)[: 2 * _COPIED_SLOTS]
    sources, targets = slots.chunk(2)
    expected = every_slot.clone()
    copies_by_torch.scatter(expected, targets, copies_by_torch.gather(expected, sources))
    launch.scatter(every_slot, targets, launch.gather(every_slot, sources))
    yield "copying slots", _distance(every_slot, expected)

    num_tokens = int(step.query_lens.sum())
    heads = normal(num_tokens, kernel.num_heads + stored, kernel.head_dim).to(dtype)
    angles = normal(num_tokens, 1, kernel.head_dim // 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    expected_heads, expected_cache, cache = heads.clone(), caches[0].clone(), caches[0]
    batch = (step.query_lens, step.seq_lens, step.tables)
    reference, plan = plan_attention(*batch, size, dtype=dtype, device=device), kernel.plan(*batch)
    TorchLayerOps().rotate_and_store(expected_heads, rotation, expected_cache, reference)
    FusedLayerOps().rotate_and_store(heads, rotation, cache, plan)
    yield "rotation", _distance(heads, expected_heads)
    yield "writing to the cache", _distance(cache, expected_cache)

    query, key_value = heads[:, : kernel.num_heads], heads[:, kernel.num_heads :]
    yield "attention", _distance(plan.attend(query, key_value, cache), reference.attend(query, key_value, cache))


def _distance(found: Tensor, expected: Tensor) -> float:
    """Largest error, relative to 1 + the expected value."""
    wide = expected.float()
    return float(((found.float() - wide).abs() / (1 + wide.abs())).max())
