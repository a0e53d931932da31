"""Llama and families that differ only in biases, over a flat batch of tokens and a paged KV cache."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from neaptide.executors.torch.layers.linear import Linear
from neaptide.executors.torch.layers.norm import RMSNorm
from neaptide.executors.torch.layers.rotary import Rotary
from neaptide.executors.torch.models.base import (
    Destination,
    GivingUp,
    RotaryRows,
    Rows,
    TorchModel,
    in_turn,
    row_tiles,
)
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.kernels.paged_attention import StepAttention
from neaptide.models.config import LlamaLikeConfig


class DecoderLayer:
    """Attention and feed-forward, each with a norm before it, added to the residual stream in place."""

    def __init__(self, config: LlamaLikeConfig, dtype: torch.dtype, device: torch.device, ops: TorchLayerOps):
        self._ops = ops
        hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, dim
        self.rotary_dim = config.rotary_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype, device=device)
        self.qkv = Linear(q_size + 2 * kv_size, hidden, bias=config.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(hidden, q_size, bias=config.out_bias, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(hidden, config.rms_norm_eps, ops, dtype=dtype, device=device)
        self.gate_up = Linear(2 * ffn, hidden, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(hidden, ffn, bias=config.mlp_bias, dtype=dtype, device=device)

    def forward_(self, hidden: Tensor, rotation: Tensor, kv_cache: Tensor, plan: StepAttention) -> None:
        """Adds this layer to ``hidden`` [num_tokens, hidden_size] and writes the tokens' keys and values."""
        num_tokens = hidden.shape[0]
        qkv = self.qkv(self.input_norm(hidden)).view(num_tokens, -1, self.head_dim)
        self.adjust_(qkv)
        self._ops.rotate_and_store(qkv, rotation, kv_cache, plan)
        query, key_value = qkv[:, : self.num_heads], qkv[:, self.num_heads :]
        attended = plan.attend(query, key_value, kv_cache)  # [num_tokens, num_heads, head_dim]
        self.out.add_to(hidden, attended.view(num_tokens, -1))
        for rows in row_tiles(hidden):
            self.down.add_to(rows, self._ops.silu_multiply(self.gate_up(self.mlp_norm(rows))))

    def adjust_(self, qkv: Tensor) -> None:
        """Hook before rotation, for a family's changes to the heads [num_tokens, query, key and value heads,
        head_dim]."""

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint name -> destination, for this layer."""
        found: dict[str, Destination] = {
            f"{prefix}.input_layernorm.weight": Rows.of(self.input_norm.weight),
            f"{prefix}.post_attention_layernorm.weight": Rows.of(self.mlp_norm.weight),
        }
        named: list[tuple[tuple[str, ...], Linear, Callable[[Tensor], list[Destination]]]] = [
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), self.qkv, self.heads_of),
            (("self_attn.o_proj",), self.out, lambda rows: [Rows.of(rows)]),
            (("mlp.gate_proj", "mlp.up_proj"), self.gate_up, halves_of),
            (("mlp.down_proj",), self.down, lambda rows: [Rows.of(rows)]),
        ]
        for names, linear, parts_of in named:
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is not None:
                    found |= zip((f"{prefix}.{name}.{kind}" for name in names), parts_of(tensor), strict=True)
        return found

    def heads_of(self, rows: Tensor) -> list[Destination]:
        """Destinations of queries, keys and values in ``rows`` of all heads."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        query, key, value = torch.split(rows, [q_size, kv_size, kv_size])
        return [self.rotary_rows(query), self.rotary_rows(key), Rows.of(value)]

    def rotary_rows(self, rows: Tensor) -> RotaryRows:
        return RotaryRows(tuple(rows.shape), rows, self.head_dim, self.rotary_dim)


def halves_of(rows: Tensor) -> list[Destination]:
    return [Rows.of(half) for half in rows.chunk(2)]


class Llama(TorchModel):
    """A Llama model."""

    config: LlamaLikeConfig
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    launches_by_size: ClassVar[bool] = True

    def __init__(self, config: LlamaLikeConfig, dtype: torch.dtype, device: torch.device, ops: TorchLayerOps):
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [self.layer_class(config, dtype, device, ops) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype=dtype, device=device)
        tied = self.embedding if config.tie_word_embeddings else None
        self.lm_head = Linear(
            config.vocab_size, config.hidden_size, bias=False, dtype=dtype, device=device, weight=tied
        )
        self.rotary = Rotary(config, device)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: list[Tensor],
        plan: StepAttention,
        giving_up: GivingUp | None = None,
    ) -> Tensor:
        hidden, rotation = self.inputs(token_ids, positions)
        for layer, layer_cache in in_turn(self.layers, kv_cache, giving_up):
            layer.forward_(hidden, rotation, layer_cache, plan)
        return hidden

    def inputs(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the first layer: hidden states [num_tokens, hidden_size], and rotations as in ``Rotary.at``."""
        return self.embedding.index_select(0, token_ids), self.rotary.at(positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden)).float()

    def linears(self) -> list[Linear]:
        in_layers = [each for layer in self.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return [*in_layers, self.lm_head]

    def destinations(self) -> dict[str, Destination]:
        found: dict[str, Destination] = {
            "model.embed_tokens.weight": Rows.of(self.embedding),
            "model.norm.weight": Rows.of(self.norm.weight),
        }
        if not self.config.tie_word_embeddings:
            assert self.lm_head.weight is not None
            found["lm_head.weight"] = Rows.of(self.lm_head.weight)
        for index, layer in enumerate(self.layers):
            found |= layer.destinations(f"model.layers.{index}")
        return found
