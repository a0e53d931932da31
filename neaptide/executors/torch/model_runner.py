"""Owns the KV cache and runs the model over input batches."""

import logging
from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from neaptide.engine.kv.slot_copies import SlotCopies, SlotRun
from neaptide.executors.torch.input_batch import InputBatch
from neaptide.executors.torch.models.base import GivingUp, TorchModel
from neaptide.executors.torch.models.recorded import RecordedLayers, record_layers
from neaptide.kernels.choice import Kernels
from neaptide.kernels.transfer import to_device

if TYPE_CHECKING:  # imports Triton
    from neaptide.executors.torch.step_graphs import StepGraphs

logger = logging.getLogger(__name__)


class ModelRunner:
    """The model and its KV cache, [num_layers, num_blocks, block_size, 2 * num_kv_heads, head_dim] in one allocation.

    Host memory has the same layout per block, for blocks that are swapped out.
    """

    def __init__(self, model: TorchModel, num_blocks: int, kernels: Kernels, *, num_host_blocks: int = 0):
        config, dtype, device = model.config, kernels.dtype, kernels.device
        self.model = model
        # A family from a plug-in may be older than this parameter.
        self._can_give_up = "giving_up" in signature(model.forward).parameters
        self.block_size = block_size = kernels.shape.block_size
        shape = (block_size, 2 * config.num_kv_heads, config.head_dim)
        self.kernels, self.plan_attention = kernels, kernels.plan_attention
        # Triton's steps may be padded: an extra block takes the padding's writes.
        num_stored = num_blocks + (kernels.kind == "triton")
        # The system hands out zeroed memory lazily: on a CPU a block costs memory on first use.
        whole = torch.zeros((config.num_layers, num_stored, *shape), dtype=dtype, device=device)
        self.kv_cache = list(whole.unbind(0))
        self._every_slot = whole.flatten(1, 2)
        on_host = (num_host_blocks, config.num_layers, *shape)
        self._host_cache = torch.empty(on_host, dtype=dtype, pin_memory=device.type == "cuda")
        self.graphs: StepGraphs | None = None
        """None until graphs have been recorded."""
        self.recorded: RecordedLayers | None = None
        if kernels.kind == "native":
            self.recorded = record_layers(model, self.kv_cache, self.plan_attention)

    def record_graphs(self) -> None:
        """Records CUDA graphs for steps of few tokens, if the device and the model allow it."""
        device = self.kv_cache[0].device
        can = self.kernels.kind == "triton" and device.type == "cuda" and torch.version.hip is None
        if not (can and getattr(self.model, "launches_by_size", False)):
            return
        from neaptide.executors.torch.step_graphs import StepGraphs, cuda_recorder

        try:
            self.graphs = StepGraphs(self.model, self.kv_cache, self.plan_attention, cuda_recorder())
        # a compiler, a driver or our code may fail; the model then launches its kernels itself
        except Exception as error:
            what, first_line = type(error).__name__, str(error).partition("\n")[0]
            logger.warning("no CUDA graphs for steps of few tokens, which is slower: %s: %s", what, first_line)

    def save(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to host memory, and waits for the copies."""
        if copies:
            blocks, slots = torch.tensor(copies).unbind(1)
            blocks = to_device(blocks, self.kv_cache[0].device)
            saved = torch.stack([layer.index_select(0, blocks) for layer in self.kv_cache], dim=1)
            self._host_cache.index_copy_(0, slots, saved.cpu())

    def load(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks back from host memory."""
        if copies:
            slots, blocks = torch.tensor(copies).unbind(1)
            device = self.kv_cache[0].device
            loaded, blocks = to_device(self._host_cache.index_select(0, slots), device), to_device(blocks, device)
            for layer, kv in zip(self.kv_cache, loaded.unbind(1), strict=True):
                layer.index_copy_(0, blocks, kv)

    def copy_slots(self, copies: SlotCopies) -> None:
        """Copies single KV slots: saves (and waits for them), then moves, then restores."""
        every_slot, size, copier = self._every_slot, self.block_size, self.kernels.slot_copier
        device, host = every_slot.device, self._host_cache
        if copies.saves:
            blocks, host_blocks, slots = _each_slot(copies.saves)
            host[host_blocks, :, slots] = copier.gather(every_slot, to_device(blocks * size + slots, device)).cpu()
        if copies.moves:
            blocks, new_blocks, slots = _each_slot(copies.moves)
            sources, targets = (to_device(each * size + slots, device) for each in (blocks, new_blocks))
            copier.scatter(every_slot, targets, copier.gather(every_slot, sources))
        if copies.restores:
            host_blocks, blocks, slots = _each_slot(copies.restores)
            restored = to_device(host[host_blocks, :, slots].contiguous(), device)
            copier.scatter(every_slot, to_device(blocks * size + slots, device), restored)

    def hidden_states(self, batch: InputBatch, giving_up: GivingUp | None = None) -> Tensor:
        """Runs the layers: [num_tokens, hidden_size] before the final norm. The batch's keys and values are then in the
        cache.

        Args:
            giving_up: None for a step that cannot be aborted.

        Raises:
            StepAborted: only part of the keys and values is in the cache.
        """
        plan = batch.attention
        if self.graphs is not None and self.graphs.takes(plan):
            return self.graphs.forward(batch.token_ids, batch.positions, plan)
        recorded = self.recorded
        if recorded is not None and recorded.takes(plan):
            return recorded.forward(batch.token_ids, batch.positions, plan, giving_up)
        if giving_up is None or not self._can_give_up:
            return self.model.forward(batch.token_ids, batch.positions, self.kv_cache, plan)
        return self.model.forward(batch.token_ids, batch.positions, self.kv_cache, plan, giving_up)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits of some token rows, [len(rows), vocab_size] fp32."""
        if len(rows) != hidden.shape[0]:
            hidden = hidden.index_select(0, to_device(torch.tensor(rows), hidden.device))
        elif rows != list(range(len(rows))):
            raise ValueError("rows must be ascending and distinct")
        return self.model.logits(hidden)


def _each_slot(runs: Sequence[SlotRun]) -> tuple[Tensor, Tensor, Tensor]:
    """Source block, target block and slot number of every copied slot."""
    sources, targets, first, end = np.array(runs, np.int64).T
    counts = end - first
    number_in_run = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    slots = np.repeat(first, counts) + number_in_run
    return (
        torch.from_numpy(np.repeat(sources, counts)),
        torch.from_numpy(np.repeat(targets, counts)),
        torch.from_numpy(slots),
    )
