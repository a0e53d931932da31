"""Long chunks of prompts on a CPU: torch computes those for which it is clearly faster than the C kernel.

Torch's attention may use instructions that the C kernel does not, such as products of whole tiles. Which one is faster
depends on the processor, the type, the chunk and its context. So both are measured once, at start.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from neaptide.kernels.paged_attention.planner import AttentionPlanner, Shape
from neaptide.kernels.paged_attention.reference import PrefillChunk, plan_attention, plan_chunk
from neaptide.kernels.paged_attention.tables import IntArray, StepTables

logger = logging.getLogger(__name__)

MOST_TOKENS = 256
"""Torch computes longer chunks in pieces: a piece's mask has an entry for each of its tokens and keys."""
BUDGET_S = 1.5
"""Time for all measurements. One that would probably not end in time is left out."""
UNMEASURED_WIDTH = 512
"""Narrower attention is left to the C kernel: a measurement would time the calls."""
_REPEATS = 3
_CLEARLY_FASTER = 0.9
"""Torch must take less than this share of the C kernel's time: noise must not decide what a step computes with."""
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class ChunkShape(NamedTuple):
    """A chunk of a prompt."""

    tokens: int
    context: int
    """Tokens before the chunk."""

    @property
    def pairs(self) -> int:
        """Products of a query and a key, about as many as its time is long."""
        return self.tokens * (self.context + self.tokens // 2)


MEASURED = (ChunkShape(256, 1024), ChunkShape(64, 1024), ChunkShape(256, 0), ChunkShape(256, 8192))
"""In this order. Each stands for chunks with as many tokens and as much context, or more."""


@dataclass(frozen=True, slots=True)
class TorchChunks:
    """Shapes for which torch is used."""

    choice: Mapping[ChunkShape, bool]
    """For each measured shape whether torch is clearly faster."""

    def takes(self, query_lens: IntArray, seq_lens: IntArray) -> list[int]:
        """The requests of a step whose tokens torch computes, ascending. Both arrays are [requests]."""
        if not any(self.choice.values()):
            return []
        least = min(shape.tokens for shape in self.choice)
        return [
            row
            for row in np.flatnonzero(query_lens >= least).tolist()
            if self._is_for_torch(int(query_lens[row]), int(seq_lens[row] - query_lens[row]))
        ]

    def _is_for_torch(self, tokens: int, context: int) -> bool:
        """As the largest measured shape that the chunk contains; the C kernel if it contains none."""
        within = [shape for shape in self.choice if shape.tokens <= tokens and shape.context <= context]
        return self.choice[max(within)] if within else False


def pieces(
    row: int,
    query_lens: IntArray,
    seq_lens: IntArray,
    tables: StepTables,
    block_size: int,
    dtype: torch.dtype,
) -> list[PrefillChunk]:
    """A request's tokens as chunks of at most ``MOST_TOKENS``, whose keys are in the cache."""
    query_len, start = int(query_lens[row]), int(query_lens[:row].sum())
    context, first = int(seq_lens[row]) - query_len, int(tables.starts[row])
    count = -(-query_len // MOST_TOKENS)
    ends = [query_len * (number + 1) // count for number in range(count)]
    found, begin = [], 0
    for end in ends:
        seq_len = context + end
        entries = tables.entries[first : first + -(-seq_len // block_size)]
        found.append(
            plan_chunk(
                start + begin, end - begin, seq_len, entries, block_size, dtype, torch.device("cpu"), from_cache=True
            )
        )
        begin = end
    return found


def measured_choice(
    model: Shape, dtype: torch.dtype, in_c: Callable[[Shape], AttentionPlanner], now_s: Callable[[], float]
) -> TorchChunks:
    """Measures both kernels on as many KV heads as there are threads.

    Torch is used for nothing if it gives other results.

    Args:
        model: its attention.
        dtype: of queries and cache.
        in_c: makes the C kernel's planner for fewer heads.
        now_s: a monotonic clock, in seconds.
    """
    if model.num_heads * model.head_dim < UNMEASURED_WIDTH:
        return TorchChunks({})
    group, kv_heads = model.num_heads // model.num_kv_heads, min(model.num_kv_heads, torch.get_num_threads())
    few = model._replace(num_heads=group * kv_heads, num_kv_heads=kv_heads)
    planner, seconds = in_c(few), dict[ChunkShape, tuple[float, float]]()
    start_s = now_s()
    for shape in MEASURED:
        measured = sum(each.pairs for each in seconds)
        passed_s = now_s() - start_s
        if measured and passed_s * (1 + shape.pairs / measured) > BUDGET_S:
            continue
        trial = _Trial(shape, few, dtype, planner)
        if not trial.agrees():
            logger.warning("torch's attention gives other results than the C kernel: it is not used for prompts")
            return TorchChunks({})
        seconds[shape] = trial.least_s(now_s)
    found = choose(seconds)
    logger.debug("chunks of prompts by torch: %s", [shape for shape, is_torch in found.choice.items() if is_torch])
    return found


def choose(seconds: Mapping[ChunkShape, tuple[float, float]]) -> TorchChunks:
    """Torch where it is clearly faster.

    Args:
        seconds: the C kernel's and torch's time for each shape.
    """
    return TorchChunks({shape: torch_s < _CLEARLY_FASTER * c_s for shape, (c_s, torch_s) in seconds.items()})


class _Plan(Protocol):
    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor: ...


class _Trial:
    """One chunk on a cache of random numbers, for both kernels."""

    def __init__(self, shape: ChunkShape, model: Shape, dtype: torch.dtype, in_c: AttentionPlanner) -> None:
        generator = torch.Generator().manual_seed(0)
        seq_len = shape.tokens + shape.context
        blocks = -(-seq_len // model.block_size)
        slot = (2 * model.num_kv_heads, model.head_dim)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator).to(dtype)

        self._query = random(shape.tokens, model.num_heads, model.head_dim)
        self._cache = random(blocks, model.block_size, *slot)
        self._key_value = self._cache.flatten(0, 1)[shape.context : seq_len]
        arguments = np.array([shape.tokens]), np.array([seq_len]), StepTables.of(np.arange(blocks)[None])
        by_torch = plan_attention(*arguments, model.block_size, dtype=dtype, device=torch.device("cpu"))
        self._plans: tuple[_Plan, _Plan] = in_c(*arguments), by_torch
        self._tolerance = _TOLERANCES[dtype]

    def agrees(self) -> bool:
        in_c, by_torch = (self._attend(plan).float() for plan in self._plans)
        return bool(torch.allclose(in_c, by_torch, atol=self._tolerance, rtol=self._tolerance))

    def least_s(self, now_s: Callable[[], float]) -> tuple[float, float]:
        """The least time of each, by turns: other work on the machine must not decide."""
        least = [math.inf, math.inf]
        for _ in range(_REPEATS):
            for which, plan in enumerate(self._plans):
                start_s = now_s()
                self._attend(plan)
                least[which] = min(least[which], now_s() - start_s)
        return least[0], least[1]

    def _attend(self, plan: _Plan) -> Tensor:
        return plan.attend(self._query, self._key_value, self._cache)
