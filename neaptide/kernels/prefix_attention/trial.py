"""A trial of the kernels on the device that they are to run on, before anything is served with them.

They are compiled for each device by what is installed there, and no machine of ours has tried all of those.
"""

import numpy as np
import torch

from neaptide.kernels.kv_write.launch import write
from neaptide.kernels.paged_attention.reference import plan_attention, write_kv
from neaptide.kernels.paged_attention.tables import StepTables
from neaptide.kernels.prefix_attention.attention import PrefixAttention

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_QUERY_LENS = (1, 1, 1, 3, 70)
_CONTEXT_LENS = (330, 331, 130, 97, 19)
"""A prefix that four of them share, a context that is split, a chunk that joins the prefix and one that does not."""
_SHARED_TOKENS = 64


def try_attention(kernel: PrefixAttention) -> None:
    """Writes and attends a step of five requests, and compares with torch.

    Raises:
        ValueError: a kernel does not compile, does not run, or computes something else; one line.
    """
    try:
        worst = _largest_difference(kernel)
    except Exception as error:  # a compiler's errors are of any kind, and torch can do without it
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"Triton's kernels fail on this device: {type(error).__name__}: {first_line}") from error
    if not worst <= _TOLERANCES[kernel.dtype]:
        raise ValueError(f"Triton's kernels compute something else than torch on this device: off by {worst:.2g}")


def _largest_difference(kernel: PrefixAttention) -> float:
    """NaN where there is one."""
    query_lens, size = np.array(_QUERY_LENS), kernel.block_size
    seq_lens = query_lens + np.array(_CONTEXT_LENS)
    rng = np.random.default_rng(0)
    num_blocks = -(-seq_lens // size)
    ids = rng.permutation(int(num_blocks.sum()))
    padded = np.zeros((len(seq_lens), int(num_blocks.max())), np.int64)
    for row, (first, count) in enumerate(zip(np.cumsum(num_blocks) - num_blocks, num_blocks, strict=True)):
        padded[row, :count] = ids[first : first + count]
    padded[1:4, : _SHARED_TOKENS // size] = padded[0, : _SHARED_TOKENS // size]
    tables = StepTables.of(padded, rng.random(len(ids))[padded] < 0.5)
    generator = torch.Generator(kernel.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=kernel.device)
        return drawn.to(kernel.dtype)

    stored = 2 * kernel.num_kv_heads
    cache = normal(len(ids), size, stored, kernel.head_dim)
    heads = normal(int(query_lens.sum()), kernel.num_heads + stored, kernel.head_dim)
    query, key_value = heads[:, : kernel.num_heads], heads[:, kernel.num_heads :]
    expected_cache = cache.clone()
    reference = plan_attention(query_lens, seq_lens, tables, size, dtype=kernel.dtype, device=kernel.device)
    write_kv(expected_cache, key_value, reference)
    expected = reference.attend(query, key_value, expected_cache)
    plan = kernel.plan(query_lens, seq_lens, tables)
    write(heads, None, cache, plan.places)
    if not torch.equal(cache, expected_cache):
        return float("inf")
    return float((plan.attend(query, key_value, cache).float() - expected.float()).abs().max())
