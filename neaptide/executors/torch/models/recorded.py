"""Steps of one token or a few on a CPU, whose layers are one call in C.

At one token of the 111M model a layer is nine calls from Python, an eighth of the step's time.
"""

import logging
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from neaptide.executors.torch.layers.products import FEW_ROWS
from neaptide.executors.torch.models.base import TorchModel
from neaptide.executors.torch.models.llama import Llama
from neaptide.kernels.linear import PackedLinear
from neaptide.kernels.native import CompileError
from neaptide.kernels.paged_attention import AttentionPlanner, StepAttention
from neaptide.kernels.paged_attention.native import NativePlan
from neaptide.kernels.recording import Recording

logger = logging.getLogger(__name__)

_TRIED_CONTEXT = 3
"""Tokens before those of the trial: it writes to other slots than what was recorded."""


class RecordedLayers:
    """The layers of a model for one number of tokens.

    Args:
        model: whose layers kernels in C compute alone.
        kv_cache: as of ``TorchModel.forward``, always the same.
        plan: of a step of so many tokens, on blocks that nobody uses: it is computed.
        num_tokens: of every step.

    Raises:
        CompileError: there is no compiler.
    """

    def __init__(self, model: Llama, kv_cache: list[Tensor], plan: NativePlan, num_tokens: int) -> None:
        self._model, self._kv_cache = model, kv_cache
        self._num_threads = torch.get_num_threads()
        zeros = torch.zeros(num_tokens, dtype=torch.int64)
        self._hidden, self._rotation = model.inputs(zeros, zeros)
        self._step = _Slots(plan.slots.clone(), plan)
        self._recording = Recording()
        with self._recording.noting():
            for layer, layer_cache in zip(model.layers, kv_cache, strict=True):
                self._recording.begin_layer()
                layer.forward_(self._hidden, self._rotation, layer_cache, self._step)

    def takes(self, plan: StepAttention) -> TypeGuard[NativePlan]:
        """Whether a step that is planned so, of as many tokens, can be computed."""
        return isinstance(plan, NativePlan) and torch.get_num_threads() == self._num_threads

    def forward(self, token_ids: Tensor, positions: Tensor, plan: NativePlan) -> Tensor:
        """As ``TorchModel.forward``, with the same bits.

        Raises:
            ValueError: a plan for another cache.
        """
        job = plan.job_for(self._kv_cache[0])
        hidden, rotation = self._model.inputs(token_ids, positions)
        self._hidden.copy_(hidden)
        self._rotation.copy_(rotation)
        self._step.slots.copy_(plan.slots)
        self._recording.replay(job)
        return self._hidden.clone()


class _Slots:
    """A plan whose slots stay where they are in memory."""

    def __init__(self, slots: Tensor, plan: NativePlan) -> None:
        self.slots = slots
        self.attend = plan.attend


def record_layers(
    model: TorchModel, kv_cache: list[Tensor], plan_attention: AttentionPlanner
) -> dict[int, RecordedLayers]:
    """By number of tokens, those that compute what the model does. The cache is written to: nothing may be in it yet.

    Args:
        model: with its weights.
        kv_cache: as of ``TorchModel.forward``.
        plan_attention: of its steps.
    """
    found: dict[int, RecordedLayers] = {}
    if not isinstance(model, Llama):
        return found
    num_blocks, block_size = kv_cache[0].shape[:2]
    room = min(num_blocks * block_size, model.config.max_position_embeddings) - _TRIED_CONTEXT
    for num_tokens in range(1, min(FEW_ROWS, room) + 1):
        if not all(isinstance(linear.product_of(num_tokens), PackedLinear) for linear in model.linears()[:-1]):
            break
        first, other = (_plan(plan_attention, start, num_tokens, block_size) for start in (0, _TRIED_CONTEXT))
        if not isinstance(first, NativePlan) or not isinstance(other, NativePlan):
            break
        try:
            recorded = RecordedLayers(model, kv_cache, first, num_tokens)
        except CompileError as error:
            logger.warning("steps of a few tokens are computed call by call, which is slower: %s", error)
            break
        if not _computes_the_same(recorded, model, kv_cache, other, num_tokens):
            break
        found[num_tokens] = recorded
    return found


def _plan(plan_attention: AttentionPlanner, start: int, num_tokens: int, block_size: int) -> StepAttention:
    """Of a request's tokens from ``start`` on, in the first blocks."""
    end = start + num_tokens
    tables = np.arange(-(-end // block_size))[None]
    return plan_attention(np.array([num_tokens]), np.array([end]), tables)


def _computes_the_same(
    recorded: RecordedLayers, model: Llama, kv_cache: list[Tensor], plan: NativePlan, num_tokens: int
) -> bool:
    """Tried on other tokens at other positions, each time with a cache that holds nothing."""
    token_ids = (torch.arange(num_tokens) + 1) * 7919 % model.config.vocab_size
    positions = torch.arange(num_tokens) + _TRIED_CONTEXT
    expected = model.forward(token_ids, positions, kv_cache, plan).clone()
    written = [_clear(layer, plan.slots) for layer in kv_cache]
    is_same = torch.equal(recorded.forward(token_ids, positions, plan), expected)
    rewritten = [_clear(layer, plan.slots) for layer in kv_cache]
    return is_same and all(map(torch.equal, written, rewritten))


def _clear(layer: Tensor, slots: Tensor) -> Tensor:
    """What was in these slots, which hold zeros now."""
    every_slot = layer.view(-1, *layer.shape[2:])
    held = every_slot[slots]
    every_slot[slots] = 0
    return held
