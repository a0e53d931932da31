"""Steps of few tokens on a GPU, replayed: a host that launches every kernel of every layer by itself takes longer than
the device computes. Imports Triton.

Attention, whose work is another in every step, is recorded with room for more than a step has
(``neaptide.kernels.prefix_attention.fixed``); tokens are padded to one of a few sizes.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from neaptide.executors.torch.models.base import TorchModel
from neaptide.kernels.paged_attention import AttentionPlanner, StepAttention, StepTables
from neaptide.kernels.prefix_attention.attention import PrefixPlan
from neaptide.kernels.prefix_attention.fixed import FixedPlan, FixedRoom

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, 1025, 32))
"""Tokens of a step: close where products of padding take time. Larger steps keep the device busy for longer than their
launches take."""
_MOST_SAMPLED = 256
"""Rows of logits: a server seldom has more requests at once."""
_TRIED_TOKENS = 5
TOLERANCE = 1e-2
"""Of the trial, in the norm of the hidden states: the same kernels and numbers, up to what a library chooses."""

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Runs a function once or more; returns how to run it again, and what it returns, which is written anew each time."""


def cuda_recorder() -> Recorder:
    """CUDA graphs, which share their memory: one is replayed at a time."""
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        compute()  # compiles kernels and lets libraries choose theirs
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            computed = compute()
        return graph.replay, computed

    return record


class StepGraphs:
    """Recorded steps of one model over one cache.

    Args:
        model: whose launches depend on nothing but the number of tokens.
        kv_cache: per layer [num_blocks, block_size, 2 * num_kv_heads, head_dim]; the last block is for padding alone.
        plan_attention: by Triton.
        record: CUDA graphs, or what stands for them.
        sizes: ascending.

    Raises:
        RuntimeError: a replay computes something else.
    """

    def __init__(
        self,
        model: TorchModel,
        kv_cache: list[Tensor],
        plan_attention: AttentionPlanner,
        record: Recorder,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        first = _in_first_block(plan_attention, 1)
        assert isinstance(first, PrefixPlan)
        device, most = kv_cache[0].device, sizes[-1]
        self._model, self._kv_cache, self._sizes = model, kv_cache, sizes
        self._token_ids, self._positions = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))
        room, spare_block = FixedRoom(first.kernel, most), len(kv_cache[0]) - 1
        self._plans = [FixedPlan(first.kernel, room, size, spare_block) for size in sizes]
        recorded = [record(partial(self._compute, number)) for number in reversed(range(len(sizes)))]
        self._recorded = recorded[::-1]  # the largest first: the others find its memory
        for _, hidden in recorded:  # libraries load what they choose for a size when it first comes
            model.logits(hidden[:_MOST_SAMPLED])
        self._try(plan_attention)

    def takes(self, plan: StepAttention) -> bool:
        """Whether the step can be replayed."""
        if not isinstance(plan, PrefixPlan):
            return False
        number = bisect_left(self._sizes, plan.num_tokens)
        return number < len(self._sizes) and self._plans[number].takes(plan)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: StepAttention) -> Tensor:
        """As the model's, of a step that can be replayed; the result holds until the next step."""
        assert isinstance(plan, PrefixPlan)
        number = self._load(token_ids, positions, plan)
        replay, hidden = self._recorded[number]
        replay()
        return hidden[: plan.num_tokens]

    def _load(self, token_ids: Tensor, positions: Tensor, plan: PrefixPlan) -> int:
        number, count = bisect_left(self._sizes, plan.num_tokens), plan.num_tokens
        self._plans[number].load(plan)
        for ours, theirs in ((self._token_ids, token_ids), (self._positions, positions)):
            ours[:count].copy_(theirs)
            ours[count : self._sizes[number]].zero_()
        return number

    def _compute(self, number: int) -> Tensor:
        size = self._sizes[number]
        return self._model.forward(self._token_ids[:size], self._positions[:size], self._kv_cache, self._plans[number])

    def _try(self, plan_attention: AttentionPlanner) -> None:
        """A prompt in the first block, replayed and not."""
        count = min(_TRIED_TOKENS, self._kv_cache[0].shape[1], self._sizes[-1])
        tokens = torch.arange(count, device=self._token_ids.device)
        plan = _in_first_block(plan_attention, count)
        replayed = self.forward(tokens, tokens, plan).float()
        expected = self._compute(bisect_left(self._sizes, count))[:count].float()
        off_by = float((replayed - expected).norm() / expected.norm())
        if not off_by <= TOLERANCE:
            raise RuntimeError(f"a replayed step is off by {off_by:.2g}")


def _in_first_block(plan_attention: AttentionPlanner, count: int) -> StepAttention:
    """A prompt's."""
    lens = np.array([count])
    return plan_attention(lens, lens, StepTables.of(np.array([[0]])))
