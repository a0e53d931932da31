"""Owns the KV cache and runs the model over input batches."""

import torch
from torch import Tensor

from neaptide.executors.torch.input_batch import InputBatch
from neaptide.executors.torch.models.base import TorchModel
from neaptide.kernels.transfer import to_device


class ModelRunner:
    """The model and its cache: one tensor per layer, [num_blocks, block_size, 2 * num_kv_heads, head_dim]."""

    def __init__(
        self, model: TorchModel, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ):
        config = model.config
        self.model = model
        self.block_size = block_size
        shape = (num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim)
        # Zeroed memory comes from the system untouched: a CPU pays for blocks as they are first used.
        self.kv_cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    def hidden_states(self, batch: InputBatch) -> Tensor:
        """[num_tokens, hidden_size], before the final norm; the batch's keys and values are in the cache after."""
        return self.model.forward(batch.token_ids, batch.positions, self.kv_cache, batch.attention)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Logits of some token rows, [len(rows), vocab_size] fp32."""
        if len(rows) != hidden.shape[0]:
            hidden = hidden.index_select(0, to_device(torch.tensor(rows), hidden.device))
        elif rows != list(range(len(rows))):
            raise ValueError("rows must be ascending and distinct")
        return self.model.logits(hidden)
