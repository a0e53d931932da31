"""Runs all layers of a CPU step in one C call.

Call by call, a layer is nine calls from Python: an eighth of the step's time at one token of the 111M model.
"""

import logging
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from neaptide.executors.torch.layers.products import TILE_ROWS
from neaptide.executors.torch.models.base import GivingUp, StepAborted, TorchModel
from neaptide.executors.torch.models.decoder import Decoder
from neaptide.kernels.native import CompileError
from neaptide.kernels.paged_attention import AttentionPlanner, StepAttention, StepTables
from neaptide.kernels.paged_attention.native import NativePlan
from neaptide.kernels.recording import CallRecording

logger = logging.getLogger(__name__)

_TRIED_CONTEXT = 3
"""Context tokens before the trial's tokens, so that the trial writes to other slots than the recording."""
_RECORDED_TOKENS = 2
_TRIED_TOKENS = (1, 5, 20)
"""Token counts that differ from the recording: fewer, and more than kernels compute at once."""


class RecordedLayers:
    """The recorded layers of a model, for steps of up to ``max_tokens`` tokens.

    Args:
        model: its layers use only C kernels, up to ``max_tokens`` tokens.
        kv_cache: as for ``TorchModel.forward``; always the same.
        plan: of a step on unused blocks; the step is computed.
        max_tokens: most tokens of a step.

    Raises:
        CompileError: there is no compiler.
    """

    def __init__(self, model: Decoder, kv_cache: list[Tensor], plan: NativePlan, max_tokens: int) -> None:
        self._model, self._kv_cache = model, kv_cache
        self.max_tokens = max_tokens
        self._num_threads = torch.get_num_threads()
        zeros, num_tokens = torch.zeros(max_tokens, dtype=torch.int64), len(plan.slots)
        self._hidden, self._rotation = model.inputs(zeros, zeros)
        self._slots = zeros
        self._slots[:num_tokens] = plan.slots
        self._recording = CallRecording(max_tokens)
        hidden = self._hidden[:num_tokens]
        rotation = None if self._rotation is None else self._rotation[:num_tokens]
        step = _Slots(self._slots[:num_tokens], plan)
        with self._recording.noting():
            for layer, layer_cache in zip(model.layers, kv_cache, strict=True):
                self._recording.begin_layer()
                layer.forward_(hidden, rotation, layer_cache, step)

    def takes(self, plan: StepAttention) -> TypeGuard[NativePlan]:
        """Whether a step with this plan can be computed."""
        is_planned = isinstance(plan, NativePlan) and not plan.chunks and len(plan.slots) <= self.max_tokens
        return is_planned and torch.get_num_threads() == self._num_threads

    def forward(
        self, token_ids: Tensor, positions: Tensor, plan: NativePlan, giving_up: GivingUp | None = None
    ) -> Tensor:
        """Computes the same bits as ``TorchModel.forward``.

        Args:
            giving_up: when the step may be aborted.

        Raises:
            ValueError: the plan is for another cache.
            StepAborted: an online request is arriving.
        """
        job, num_tokens = plan.job_for(self._kv_cache[0]), len(token_ids)
        hidden, rotation = self._model.inputs(token_ids, positions)
        self._hidden[:num_tokens] = hidden
        if self._rotation is not None and rotation is not None:
            self._rotation[:num_tokens] = rotation
        self._slots[:num_tokens] = plan.slots
        counts, share = (None, 0.0) if giving_up is None else (giving_up.arrivals.address, giving_up.share)
        if not self._recording.replay(job, num_tokens, counts, share):
            raise StepAborted
        return self._hidden[:num_tokens].clone()


class _Slots:
    """A plan whose slots keep their memory address."""

    def __init__(self, slots: Tensor, plan: NativePlan) -> None:
        self.slots = slots
        self.attend = plan.attend


def record_layers(model: TorchModel, kv_cache: list[Tensor], plan_attention: AttentionPlanner) -> RecordedLayers | None:
    """Records the model's layers, up to the most tokens that one C product computes; None if that is not possible.

    The trial writes to the cache, which must be empty.

    Args:
        model: with loaded weights.
        kv_cache: as for ``TorchModel.forward``.
        plan_attention: the planner of the model's steps.
    """
    if not isinstance(model, Decoder) or not model.calls_only_c:
        return None
    num_blocks, block_size = kv_cache[0].shape[:2]
    room = min(num_blocks * block_size, model.config.max_position_embeddings) - _TRIED_CONTEXT
    max_tokens = min(TILE_ROWS, *(linear.most_rows_in_c() for linear in model.linears()[:-1]))
    tried = [num_tokens for num_tokens in _TRIED_TOKENS if num_tokens <= min(room, max_tokens)]
    if max_tokens < _RECORDED_TOKENS or not tried:
        return None
    plan = _plan(plan_attention, 0, _RECORDED_TOKENS, block_size)
    if not isinstance(plan, NativePlan):
        return None
    try:
        recorded = RecordedLayers(model, kv_cache, plan, max_tokens)
    except CompileError as error:
        logger.warning("steps are computed call by call, which is slower: %s", error)
        return None
    for num_tokens in tried:
        plan = _plan(plan_attention, _TRIED_CONTEXT, num_tokens, block_size)
        if not isinstance(plan, NativePlan) or not _computes_the_same(recorded, model, kv_cache, plan, num_tokens):
            return None
    return recorded


def _plan(plan_attention: AttentionPlanner, start: int, num_tokens: int, block_size: int) -> StepAttention:
    """Plan of a request's tokens from ``start`` on, in the first blocks."""
    end = start + num_tokens
    tables = StepTables.of(np.arange(-(-end // block_size))[None])
    return plan_attention(np.array([num_tokens]), np.array([end]), tables)


def _computes_the_same(
    recorded: RecordedLayers, model: Decoder, kv_cache: list[Tensor], plan: NativePlan, num_tokens: int
) -> bool:
    """Whether the recording gives the model's bits, for other tokens at other positions. The slots are cleared each
    time."""
    token_ids = (torch.arange(num_tokens) + 1) * 7919 % model.config.vocab_size
    positions = torch.arange(num_tokens) + _TRIED_CONTEXT
    expected = model.forward(token_ids, positions, kv_cache, plan).clone()
    written = [_clear(layer, plan.slots) for layer in kv_cache]
    is_same = torch.equal(recorded.forward(token_ids, positions, plan), expected)
    rewritten = [_clear(layer, plan.slots) for layer in kv_cache]
    return is_same and all(map(torch.equal, written, rewritten))


def _clear(layer: Tensor, slots: Tensor) -> Tensor:
    """Zeroes these slots; returns what they held."""
    every_slot = layer.view(-1, *layer.shape[2:])
    held = every_slot[slots]
    every_slot[slots] = 0
    return held
