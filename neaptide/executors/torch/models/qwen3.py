"""Qwen3 over a flat batch of tokens and a paged KV cache: Llama with a norm on every head of queries and keys."""

from typing import ClassVar

import torch
from torch import Tensor

from neaptide.executors.torch.models.base import Destination
from neaptide.executors.torch.models.llama import DecoderLayer, Llama
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.models.config import LlamaLikeConfig


class Qwen3Layer(DecoderLayer):
    """A Llama layer whose query heads share one norm weight, and whose key heads share another."""

    def __init__(self, config: LlamaLikeConfig, dtype: torch.dtype, device: torch.device, ops: TorchLayerOps):
        super().__init__(config, dtype, device, ops)
        self._eps = config.rms_norm_eps
        self.query_norm, self.key_norm = (torch.empty(config.head_dim, dtype=dtype, device=device) for _ in range(2))

    def adjust_(self, qkv: Tensor) -> None:
        keys_end = self.num_heads + self.num_kv_heads
        self._ops.norm_heads_(qkv[:, : self.num_heads], self.query_norm, self._eps)
        self._ops.norm_heads_(qkv[:, self.num_heads : keys_end], self.key_norm, self._eps)

    def destinations(self, prefix: str) -> dict[str, Destination]:
        found = super().destinations(prefix)
        for name, weight in (("q_norm", self.query_norm), ("k_norm", self.key_norm)):
            # In the order of the head dimensions that it scales.
            found[f"{prefix}.self_attn.{name}.weight"] = self.rotary_rows(weight)
        return found


class Qwen3(Llama):
    """A Qwen3 model."""

    layer_class: ClassVar[type[DecoderLayer]] = Qwen3Layer
