"""Owns the KV cache and runs the model over input batches."""

import logging
from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.slot_copies import SlotCopies, SlotRun
from neaptide.executors.torch.input_batch import InputBatch
from neaptide.executors.torch.models.base import GivingUp, TorchModel
from neaptide.executors.torch.models.recorded import RecordedLayers, record_layers
from neaptide.kernels.choice import Kernels
from neaptide.kernels.host_rows import HostRows, Transfer
from neaptide.kernels.transfer import to_device

if TYPE_CHECKING:  # imports Triton
    from neaptide.executors.torch.step_graphs import StepGraphs

logger = logging.getLogger(__name__)


class ModelRunner:
    """The model and its KV cache, [num_layers, num_blocks, block_size, 2 * num_kv_heads, head_dim] in one allocation.

    Host memory has a row for each slot, [num_layers, 2 * num_kv_heads, head_dim], for what is swapped out.
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
        self._host = HostRows(num_host_blocks * block_size, (config.num_layers, *shape[1:]), dtype, device)
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

    def save(self, copies: Sequence[tuple[int, int]]) -> list[Transfer]:
        """Copies blocks to host memory while later work runs. That work may overwrite them."""
        if not copies:
            return []
        blocks, host_blocks = np.array(copies, np.int64).T
        return self._save(self._slots_of(blocks), self._slots_of(host_blocks))

    def load(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks back from host memory, before later work."""
        if copies:
            host_blocks, blocks = np.array(copies, np.int64).T
            self._load(self._slots_of(host_blocks), self._slots_of(blocks))

    def copy_slots(self, copies: SlotCopies) -> list[Transfer]:
        """Copies single KV slots: saves, then moves, then restores. Returns the saves, which run while later work
        does."""
        size, transfers = self.block_size, []
        if copies.saves:
            blocks, host_blocks, slots = _each_slot(copies.saves)
            transfers = self._save(blocks * size + slots, host_blocks * size + slots)
        if copies.moves:
            every_slot, copier = self._every_slot, self.kernels.slot_copier
            blocks, new_blocks, slots = _each_slot(copies.moves)
            sources, targets = self._on_device(blocks * size + slots), self._on_device(new_blocks * size + slots)
            copier.scatter(every_slot, targets, copier.gather(every_slot, sources))
        if copies.restores:
            host_blocks, blocks, slots = _each_slot(copies.restores)
            self._load(host_blocks * size + slots, blocks * size + slots)
        return transfers

    def _save(self, slots: IntArray, host_slots: IntArray) -> list[Transfer]:
        on_device, gather = self._on_device(slots), self.kernels.slot_copier.gather
        return self._host.save(host_slots, lambda piece: gather(self._every_slot, on_device[piece]))

    def _load(self, host_slots: IntArray, slots: IntArray) -> None:
        on_device, scatter = self._on_device(slots), self.kernels.slot_copier.scatter
        self._host.load(host_slots, lambda piece, loaded: scatter(self._every_slot, on_device[piece], loaded))

    def _slots_of(self, blocks: IntArray) -> IntArray:
        """All slots of the blocks, in order."""
        slots: IntArray = blocks[:, None] * self.block_size + np.arange(self.block_size)
        return slots.reshape(-1)

    def _on_device(self, slots: IntArray) -> Tensor:
        return to_device(torch.from_numpy(slots), self._every_slot.device)

    def close(self) -> None:
        """Ends copies in flight."""
        self._host.close()

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


def _each_slot(runs: Sequence[SlotRun]) -> tuple[IntArray, IntArray, IntArray]:
    """Source block, target block and slot number of every copied slot."""
    sources, targets, first, end = np.array(runs, np.int64).T
    counts = end - first
    number_in_run = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    slots: IntArray = np.repeat(first, counts) + number_in_run
    return np.repeat(sources, counts), np.repeat(targets, counts), slots
