"""CUDA graphs for steps of few tokens, because launching each kernel of each layer takes longer than computing.

Imports Triton. Attention differs in every step, so it is recorded with more room than a step needs
(``neaptide.kernels.prefix_attention.fixed``). Tokens are padded to one of a few sizes.
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
"""Recorded token counts: close together where padding costs time. Larger steps take longer than their launches."""
_MOST_SAMPLED = 256
"""Rows of logits; a server seldom has more requests at once."""
_TRIED_TOKENS = 5
TOLERANCE = 1e-2
"""Relative error allowed in the trial, in the norm of the hidden states. The kernels are the same, but libraries may
choose others."""

Replay = Callable[[], None]
Recorder = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Runs a function at least once. Returns a function that runs it again, and its result, which each replay
overwrites."""


def cuda_recorder() -> Recorder:
    """Records CUDA graphs that share their memory: only one is replayed at a time."""
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
        model: its launches depend only on the number of tokens.
        kv_cache: per layer [num_blocks, block_size, 2 * num_kv_heads, head_dim]; the last block is for padding only.
        plan_attention: Triton's planner.
        record: records CUDA graphs, or a test's substitute.
        sizes: token counts, ascending.

    Raises:
        RuntimeError: a replay gives other results.
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
        self._recorded = recorded[::-1]  # the largest was recorded first, so that the others reuse its memory
        for _, hidden in recorded:  # libraries load their choice for a size on its first use
            model.logits(hidden[:_MOST_SAMPLED])
        self._try(plan_attention)

    def takes(self, plan: StepAttention) -> bool:
        """Whether the step can be replayed."""
        if not isinstance(plan, PrefixPlan):
            return False
        number = bisect_left(self._sizes, plan.num_tokens)
        return number < len(self._sizes) and self._plans[number].takes(plan)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: StepAttention) -> Tensor:
        """The model's ``forward`` for a step that can be replayed. The result is valid until the next step."""
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
        """Compares a replayed prompt in the first block with a computed one."""
        count = min(_TRIED_TOKENS, self._kv_cache[0].shape[1], self._sizes[-1])
        tokens = torch.arange(count, device=self._token_ids.device)
        plan = _in_first_block(plan_attention, count)
        replayed = self.forward(tokens, tokens, plan).float()
        expected = self._compute(bisect_left(self._sizes, count))[:count].float()
        off_by = float((replayed - expected).norm() / expected.norm())
        if not off_by <= TOLERANCE:
            raise RuntimeError(f"a replayed step is off by {off_by:.2g}")


def _in_first_block(plan_attention: AttentionPlanner, count: int) -> StepAttention:
    """Plan of a prompt in the first block."""
    lens = np.array([count])
    return plan_attention(lens, lens, StepTables.of(np.array([[0]])))
