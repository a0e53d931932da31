"""OPT over a flat batch of tokens and a paged KV cache."""

import torch
from torch import Tensor

from neaptide.executors.torch.layers.linear import Linear
from neaptide.executors.torch.layers.norm import LayerNorm
from neaptide.executors.torch.models.base import Destination, GivingUp, Rows, TorchModel, in_turn, row_tiles
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.kernels.paged_attention import StepAttention, write_kv
from neaptide.models.families.opt import OptConfig

_EPS = 1e-5
_UNUSED_POSITIONS = 2
"""Rows of the position table before position 0."""


class OptLayer:
    """Attention and feed-forward, added to the residual stream in place. Norms come before or after each of them."""

    def __init__(self, config: OptConfig, dtype: torch.dtype, device: torch.device):
        hidden, ffn, bias = config.hidden_size, config.intermediate_size, config.bias
        self._hidden_size, self._head_dim, self._norms_first = hidden, config.head_dim, config.norms_first
        self.attention_norm, self.mlp_norm = (LayerNorm(hidden, _EPS, dtype=dtype, device=device) for _ in range(2))
        self.qkv = Linear(3 * hidden, hidden, bias=bias, dtype=dtype, device=device)
        self.out = Linear(hidden, hidden, bias=bias, dtype=dtype, device=device)
        self.up = Linear(ffn, hidden, bias=bias, dtype=dtype, device=device)
        self.down = Linear(hidden, ffn, bias=bias, dtype=dtype, device=device)

    def forward_(self, hidden: Tensor, kv_cache: Tensor, plan: StepAttention) -> None:
        """Adds this layer to ``hidden`` [num_tokens, hidden_size] and writes the tokens' keys and values."""
        num_tokens, first = hidden.shape[0], self._norms_first
        qkv = self.qkv(self.attention_norm(hidden) if first else hidden).view(num_tokens, -1, self._head_dim)
        num_heads = qkv.shape[1] // 3
        query, key_value = qkv[:, :num_heads], qkv[:, num_heads:]
        write_kv(kv_cache, key_value, plan)
        attended = plan.attend(query, key_value, kv_cache)  # [num_tokens, num_heads, head_dim]
        self.out.add_to(hidden, attended.view(num_tokens, -1))
        if not first:
            hidden.copy_(self.attention_norm(hidden))
        for rows in row_tiles(hidden):
            self.down.add_to(rows, self.up(self.mlp_norm(rows) if first else rows).relu_())
        if not first:
            hidden.copy_(self.mlp_norm(hidden))

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint name -> destination, for this layer."""
        hidden = self._hidden_size
        found: dict[str, Destination] = {}
        for name, norm in (("self_attn_layer_norm", self.attention_norm), ("final_layer_norm", self.mlp_norm)):
            found |= norm_destinations(f"{prefix}.{name}", norm)
        parts = [
            ("self_attn.q_proj", self.qkv, slice(0, hidden)),
            ("self_attn.k_proj", self.qkv, slice(hidden, 2 * hidden)),
            ("self_attn.v_proj", self.qkv, slice(2 * hidden, None)),
            ("self_attn.out_proj", self.out, slice(None)),
            ("fc1", self.up, slice(None)),
            ("fc2", self.down, slice(None)),
        ]
        for name, linear, rows in parts:
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is not None:
                    found[f"{prefix}.{name}.{kind}"] = Rows.of(tensor[rows])
        return found


class Opt(TorchModel):
    """An OPT model."""

    config: OptConfig

    def __init__(self, config: OptConfig, dtype: torch.dtype, device: torch.device, ops: TorchLayerOps):
        self.config = config
        hidden, num_positions = config.hidden_size, config.max_position_embeddings + _UNUSED_POSITIONS
        self.embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
        self.positions = torch.empty(num_positions, hidden, dtype=dtype, device=device)
        self.layers = [OptLayer(config, dtype, device) for _ in range(config.num_layers)]
        self.norm = LayerNorm(hidden, _EPS, dtype=dtype, device=device) if config.final_norm else None
        tied = self.embedding if config.tie_word_embeddings else None
        self.lm_head = Linear(config.vocab_size, hidden, bias=False, dtype=dtype, device=device, weight=tied)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: list[Tensor],
        plan: StepAttention,
        giving_up: GivingUp | None = None,
    ) -> Tensor:
        hidden = self.embedding.index_select(0, token_ids)
        hidden += self.positions.index_select(0, positions + _UNUSED_POSITIONS)
        for layer, layer_cache in in_turn(self.layers, kv_cache, giving_up):
            layer.forward_(hidden, layer_cache, plan)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden if self.norm is None else self.norm(hidden)).float()

    def linears(self) -> list[Linear]:
        in_layers = [each for layer in self.layers for each in (layer.qkv, layer.out, layer.up, layer.down)]
        return [*in_layers, self.lm_head]

    def destinations(self) -> dict[str, Destination]:
        decoder = "model.decoder"
        found: dict[str, Destination] = {
            f"{decoder}.embed_tokens.weight": Rows.of(self.embedding),
            f"{decoder}.embed_positions.weight": Rows.of(self.positions),
        }
        if self.norm is not None:
            found |= norm_destinations(f"{decoder}.final_layer_norm", self.norm)
        if not self.config.tie_word_embeddings:
            assert self.lm_head.weight is not None
            found["lm_head.weight"] = Rows.of(self.lm_head.weight)
        for index, layer in enumerate(self.layers):
            found |= layer.destinations(f"{decoder}.layers.{index}")
        return found


def norm_destinations(name: str, norm: LayerNorm) -> dict[str, Destination]:
    """Checkpoint name -> destination, for a norm's weight and bias."""
    parts = (("weight", norm.weight), ("bias", norm.bias))
    return {f"{name}.{kind}": Rows.of(tensor) for kind, tensor in parts}
