"""Checks Triton's attention against torch on the same device, then times it and counts the memory that it reads."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gpu.ceilings import seconds_per_call
from benchmarks.gpu.random_llama import LLAMA_8B, TINY, LlamaShape
from neaptide.kernels.paged_attention import StepTables, plan_attention
from neaptide.kernels.prefix_attention.attention import PrefixAttention
from neaptide.kernels.prefix_attention.tiles import Tiles

BLOCK_SIZE = 16
TOLERANCE = 3e-2
"""Absolute, in bf16, for values of standard deviation 1 and their averages."""
COLD_BYTES = 256 << 20
"""KV bytes read before the same KV is read again, so that no cache holds it, as in a model's layers."""
TARGET_S = 0.03
"""Duration of one timed loop."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of a step. The shared prefix of a group is its requests' first blocks."""

    name: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    groups: int = 0
    """Number of groups of requests that share a prefix; 0: no sharing. Requests of a group are adjacent."""
    shared_tokens: int = 0
    reversed_share: float = 0.0
    """Fraction of blocks whose slots are in reverse order."""

    def tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Block ids [requests, blocks] in random order, and whether each is reversed."""
        rng = np.random.default_rng(0)
        lens = np.array(self.query_lens) + np.array(self.context_lens)
        width = -(-int(lens.max()) // BLOCK_SIZE)
        tables = rng.permutation(len(lens) * width).reshape(len(lens), width)
        if self.groups:
            shared = self.shared_tokens // BLOCK_SIZE
            owners = np.arange(len(lens)) * self.groups // len(lens) * -(-len(lens) // self.groups)
            tables[:, :shared] = tables[owners, :shared]
        return tables, rng.random(len(lens) * width)[tables] < self.reversed_share

    def kv_tokens(self, tables: npt.NDArray[np.int64]) -> int:
        """Number of distinct slots that are read."""
        lens = np.array(self.query_lens) + np.array(self.context_lens)
        slots = (tables[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(len(lens), -1)
        is_read = np.arange(slots.shape[1]) < lens[:, None]
        return len(np.unique(slots[is_read]))


def _steps() -> Sequence[Step]:
    own = np.random.default_rng(1).integers(32, 257, 256)
    behind = tuple((2048 + own).tolist())
    mixed = (1,) * 192 + (256,) * 7
    return (
        Step("decode 1 at 1k", (1,), (1023,)),
        Step("decode 64 at 1k", (1,) * 64, (1023,) * 64),
        Step("decode 256 at 1k", (1,) * 256, (1023,) * 256),
        Step("decode 64 at 1k, half of the blocks reversed", (1,) * 64, (1023,) * 64, reversed_share=0.5),
        Step("decode 4 at 32k", (1,) * 4, (32767,) * 4),
        Step("decode 256, one prefix of 2k", (1,) * 256, behind, groups=1, shared_tokens=2048),
        Step("decode 256, 16 prefixes of 2k", (1,) * 256, behind, groups=16, shared_tokens=2048),
        Step("7 chunks of 256 and decode 192, one prefix of 2k", mixed, behind[:199], groups=1, shared_tokens=2048),
        Step("prefill 4 x 1k", (1024,) * 4, (0,) * 4),
    )


STEPS = _steps()
DRY_STEPS = (
    Step("decode 3 at 40", (1,) * 3, (39, 20, 50), reversed_share=0.5),
    Step("decode 5 and a chunk of 9, one prefix of 64", (1, 1, 1, 1, 1, 9), (70, 66, 80, 64, 90, 64), 1, 64),
)


def measure_kernels(device: torch.device, *, dry: bool, progress: Progress) -> dict[str, Any]:
    """Runs every step by the kernel, with and without merged prefixes, and by torch."""
    shape = TINY if dry else LLAMA_8B
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for step in DRY_STEPS if dry else STEPS:
            found.append(_measure(step, shape, device, dry=dry))
            row = found[-1]
            progress(
                f"{step.name}: off by {row['max_difference']:.2g}, {row['kernel_s'] * 1e6:.0f} us "
                f"({row['kv_gb_per_s']:.0f} GB/s of KV), alone {row['unshared_s'] * 1e6:.0f}, "
                f"torch {row['torch_s'] * 1e6:.0f}"
            )
    return {"ok": all(row["max_difference"] <= TOLERANCE for row in found), "tolerance": TOLERANCE, "steps": found}


def _measure(step: Step, shape: LlamaShape, device: torch.device, *, dry: bool) -> dict[str, Any]:
    block_tables, are_reversed = step.tables()
    tables = StepTables.of(block_tables, are_reversed)
    query_lens = np.array(step.query_lens)
    seq_lens = query_lens + np.array(step.context_lens)
    row_bytes = 2 * shape.kv_heads * shape.head_dim * 2
    read_bytes = step.kv_tokens(block_tables) * row_bytes
    caches, query, key_value = tensors(step, shape, device, 1 if dry else 1 + COLD_BYTES // read_bytes)
    heads = (shape.heads, shape.kv_heads, shape.head_dim, torch.bfloat16, BLOCK_SIZE, device)
    shared, alone = PrefixAttention(*heads), PrefixAttention(*heads, merge_prefixes=False)
    reference = plan_attention(query_lens, seq_lens, tables, BLOCK_SIZE, dtype=torch.bfloat16, device=device)
    expected = reference.attend(query, key_value, caches[0]).float()
    seconds, differences = {}, []
    for name, kernel in (("kernel_s", shared), ("unshared_s", alone)):
        plan = kernel.plan(query_lens, seq_lens, tables)
        differences.append(float((plan.attend(query, key_value, caches[0]).float() - expected).abs().max()))
        seconds[name] = _seconds(plan.attend, query, key_value, caches, dry=dry)
    seconds["torch_s"] = _seconds(reference.attend, query, key_value, caches, dry=dry)
    worst = max(differences, key=lambda difference: float("inf") if difference != difference else difference)
    return {
        "step": step.name,
        "max_difference": worst,
        "kv_bytes": read_bytes,
        "kv_gb_per_s": read_bytes / seconds["kernel_s"] / 1e9,
        **seconds,
    }


def tensors(
    step: Step, shape: LlamaShape, device: torch.device, num_caches: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Caches with the step's keys and values, the queries, and the step's own keys and values."""
    tables, are_reversed = step.tables()
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(torch.bfloat16)

    blocks = int(tables.max()) + 1
    caches = [normal(blocks, BLOCK_SIZE, 2 * shape.kv_heads, shape.head_dim) for _ in range(num_caches)]
    query_lens = np.array(step.query_lens)
    plan = plan_attention(
        query_lens,
        query_lens + np.array(step.context_lens),
        StepTables.of(tables, are_reversed),
        BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=device,
    )
    query = normal(int(query_lens.sum()), shape.heads, shape.head_dim)
    return caches, query, caches[0].flatten(0, 1).index_select(0, plan.slots)


def _seconds(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key_value: Tensor,
    caches: list[Tensor],
    *,
    dry: bool,
) -> float:
    """Seconds of one call; every call uses the next cache. In a dry run, of a single call."""

    def every() -> None:
        for cache in caches:
            attend(query, key_value, cache)

    if dry:
        start_s = time.perf_counter()
        every()
        return time.perf_counter() - start_s
    return seconds_per_call(every, query.device, TARGET_S) / len(caches)


def step_seconds(step: Step, shape: LlamaShape, tiles: Tiles, device: torch.device, *, dry: bool) -> float:
    """Seconds of a step's attention with given tiles, for tuning."""
    tables, are_reversed = step.tables()
    query_lens = np.array(step.query_lens)
    row_bytes = 2 * shape.kv_heads * shape.head_dim * 2
    num_caches = 1 if dry else 1 + COLD_BYTES // (step.kv_tokens(tables) * row_bytes)
    caches, query, key_value = tensors(step, shape, device, num_caches)
    kernel = PrefixAttention(
        shape.heads, shape.kv_heads, shape.head_dim, torch.bfloat16, BLOCK_SIZE, device, tiles=tiles
    )
    seq_lens = query_lens + np.array(step.context_lens)
    plan = kernel.plan(query_lens, seq_lens, StepTables.of(tables, are_reversed))
    return _seconds(plan.attend, query, key_value, caches, dry=dry)
