"""The dense decoder of all our families, over a flat batch of tokens and a paged KV cache.

``DecoderConfig`` says what its layers are made of.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from neaptide.executors.torch.layers.linear import Linear
from neaptide.executors.torch.layers.norm import LayerNorm, RMSNorm
from neaptide.executors.torch.layers.rotary import Rotary
from neaptide.executors.torch.models.base import (
    ByHead,
    Destination,
    GivingUp,
    RotaryRows,
    Rows,
    Shifted,
    Stacked,
    TorchModel,
    Transposed,
    in_turn,
    row_tiles,
)
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.kernels.paged_attention import StepAttention
from neaptide.models.config import DecoderConfig

Norm = RMSNorm | LayerNorm


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2_(x: Tensor) -> Tensor:
    return x.relu_().square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": Tensor.relu_,
    "relu2": _relu2_,
}
"""Activations without a gate; they may overwrite their input."""


class DecoderLayer:
    """Attention and feed-forward, added to the residual stream in place."""

    def __init__(self, config: DecoderConfig, index: int, dtype: torch.dtype, device: torch.device, ops: TorchLayerOps):
        self.config, self._ops = config, ops
        hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, dim
        self.is_rotated = config.rope is not None and index not in config.unrotated_layers
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.qkv = Linear(q_size + 2 * kv_size, hidden, bias=config.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(hidden, q_size, bias=config.out_bias, dtype=dtype, device=device)
        up_size = (1 + config.gated) * ffn
        self.up = Linear(up_size, hidden, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(hidden, ffn, bias=config.mlp_bias, dtype=dtype, device=device)
        self._activate = ops.silu_multiply if config.gated else ACTIVATIONS[config.activation]

        def norm(exists: bool, eps: float) -> Norm | None:
            return make_norm(config, eps, ops, dtype, device) if exists else None

        has_first, has_last = config.norm_place in ("before", "both"), config.norm_place != "before"
        self.attention_norm = norm(has_first, stream_eps(config))
        self.mlp_norm = norm(has_first and not config.shared_norm, stream_eps(config))
        self.attention_out_norm = norm(has_last, config.norm_eps)
        self.mlp_out_norm = norm(has_last, config.norm_eps)
        self._is_on_sum, self._is_parallel = config.norm_place == "on_sum", config.parallel
        sizes = {"none": None, "head": (dim, dim), "all": (q_size, kv_size)}[config.qk_norm]
        self.qk_norms = None if sizes is None else [torch.empty(size, dtype=dtype, device=device) for size in sizes]

    def forward_(self, hidden: Tensor, rotation: Tensor | None, kv_cache: Tensor, plan: StepAttention) -> None:
        """Adds this layer to ``hidden`` [num_tokens, hidden_size] and writes the tokens' keys and values."""
        first, second = self.attention_norm, self.mlp_norm
        inputs = hidden if first is None else first(hidden)
        attended = self._attend(inputs, rotation if self.is_rotated else None, kv_cache, plan)
        if self._is_parallel:
            inputs = inputs if second is None else second(hidden)
            self.out.add_to(hidden, attended)
            for rows, row_inputs in zip(row_tiles(hidden), row_tiles(inputs), strict=True):
                self.down.add_to(rows, self._activate(self.up(row_inputs)))
            return
        self._add(self.out, attended, hidden, self.attention_out_norm)
        for rows in row_tiles(hidden):
            activated = self._activate(self.up(rows if second is None else second(rows)))
            self._add(self.down, activated, rows, self.mlp_out_norm)

    def _attend(self, inputs: Tensor, rotation: Tensor | None, kv_cache: Tensor, plan: StepAttention) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim]."""
        num_tokens = inputs.shape[0]
        qkv = self.qkv(inputs).view(num_tokens, -1, self.head_dim)
        if self.qk_norms is not None:
            if self.config.qk_norm_after_rotation and rotation is not None:
                self._ops.rotate_(qkv[:, : self.num_heads + self.num_kv_heads], rotation)
                rotation = None
            self._norm_queries_and_keys_(qkv, self.qk_norms)
        self._ops.rotate_and_store(qkv, rotation, kv_cache, plan)
        query, key_value = qkv[:, : self.num_heads], qkv[:, self.num_heads :]
        attended = plan.attend(query, key_value, kv_cache)  # [num_tokens, num_heads, head_dim]
        return attended.view(num_tokens, -1)

    def _norm_queries_and_keys_(self, qkv: Tensor, norms: Sequence[Tensor]) -> None:
        keys_end = self.num_heads + self.num_kv_heads
        for heads, norm in zip((qkv[:, : self.num_heads], qkv[:, self.num_heads : keys_end]), norms, strict=True):
            # The norm of all heads together is that of one wide head.
            self._ops.norm_heads_(heads.view(len(heads), -1, len(norm)), norm, self.config.norm_eps)

    def _add(self, linear: Linear, x: Tensor, hidden: Tensor, norm: Norm | None) -> None:
        """Adds a projection to the residual stream, with the norm that comes after it."""
        if norm is None:
            linear.add_to(hidden, x)
        elif self._is_on_sum:
            linear.add_to(hidden, x)
            hidden.copy_(norm(hidden))
        else:
            hidden.add_(norm(linear(x)))

    def destinations(self, prefix: str) -> dict[str, Destination]:
        """Checkpoint name -> destination, for this layer."""
        config, names = self.config, self.config.names
        found: dict[str, Destination] = {}
        for name, norm in (
            (names.attention_norm, self.attention_norm),
            (names.mlp_norm, self.mlp_norm),
            (names.attention_out_norm, self.attention_out_norm),
            (names.mlp_out_norm, self.mlp_out_norm),
        ):
            if norm is not None:
                found |= norm_destinations(f"{prefix}.{name}", norm, config.norm_offset)
        for name, weight in zip(names.qk_norms, self.qk_norms or (), strict=False):
            # In the order of the head dimensions that it scales.
            found[f"{prefix}.{name}.weight"] = self._rotary_rows(weight)
        linears = [(names.qkv, self.qkv), ((names.out,), self.out), (names.up, self.up), ((names.down,), self.down)]
        for stacked, linear in linears:
            for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                if tensor is not None:
                    parts = self._parts(linear, tensor, len(stacked))
                    found |= zip((f"{prefix}.{name}.{kind}" for name in stacked), parts, strict=True)
        return found

    def _parts(self, linear: Linear, rows: Tensor, count: int) -> list[Destination]:
        """Destinations of a linear layer's tensors in the checkpoint."""
        parts: list[Destination] = [Rows.of(part) for part in rows.chunk(count)]
        if linear is self.qkv:
            q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            query, key, value = torch.split(rows, [q_size, kv_size, kv_size])
            parts = [self._rotary_rows(query), self._rotary_rows(key), Rows.of(value)]
            if count == 1:
                parts = [ByHead(parts, self.head_dim) if self.config.stacked_by_head else Stacked(parts)]
        is_transposed = self.config.transposed and rows.dim() == 2
        return [Transposed(part) for part in parts] if is_transposed else parts

    def _rotary_rows(self, rows: Tensor) -> Destination:
        if not self.is_rotated or self.config.adjacent_pairs:
            return Rows.of(rows)
        return RotaryRows(tuple(rows.shape), rows, self.head_dim, self.config.rotary_dim)


class Decoder(TorchModel):
    """A model of any of our families."""

    config: DecoderConfig
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    launches_by_size: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, ops: TorchLayerOps):
        self.config = config
        hidden = config.hidden_size
        self.embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = [self.layer_class(config, index, dtype, device, ops) for index in range(config.num_layers)]
        self.norm = make_norm(config, stream_eps(config), ops, dtype, device) if config.final_norm else None
        tied = self.embedding if config.tie_word_embeddings else None
        self.lm_head = Linear(config.vocab_size, hidden, bias=config.head_bias, dtype=dtype, device=device, weight=tied)
        self.positions: Tensor | None = None
        self.rotary: Rotary | None = None
        if config.rope is None:
            num_positions = config.max_position_embeddings + config.position_offset
            self.positions = torch.empty(num_positions, hidden, dtype=dtype, device=device)
        else:
            self.rotary = Rotary(config, config.rope, device)
        # See ``stream_eps``.
        self._embedding_scale = config.embedding_scale / config.residual_scale

    @property
    def calls_only_c(self) -> bool:
        """Whether the C kernels have all that the layers compute, besides their products."""
        config = self.config
        is_turned_in_c = not config.qk_norm_after_rotation
        return config.norm == "rms" and config.norm_place == "before" and config.gated and is_turned_in_c

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

    def inputs(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """Inputs of the first layer: hidden states [num_tokens, hidden_size], and rotations as in ``Rotary.at``."""
        hidden = self.embedding.index_select(0, token_ids)
        if self._embedding_scale != 1.0:
            hidden *= self._embedding_scale
        if self.positions is not None:
            learned = self.positions.index_select(0, positions + self.config.position_offset)
            hidden.add_(learned, alpha=1 / self.config.residual_scale)
        return hidden, None if self.rotary is None else self.rotary.at(positions)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden if self.norm is None else self.norm(hidden)).float()
        scale = self.config.logit_scale
        return logits if scale == 1.0 else logits.mul_(scale)

    def linears(self) -> list[Linear]:
        in_layers = [each for layer in self.layers for each in (layer.qkv, layer.out, layer.up, layer.down)]
        return [*in_layers, self.lm_head]

    def destinations(self) -> dict[str, Destination]:
        names = self.config.names
        prefix = names.prefix
        found: dict[str, Destination] = {f"{prefix}{names.embedding}.weight": Rows.of(self.embedding)}
        if self.positions is not None:
            found[f"{prefix}{names.positions}.weight"] = Rows.of(self.positions)
        if self.norm is not None:
            found |= norm_destinations(f"{prefix}{names.final_norm}", self.norm, self.config.norm_offset)
        if not self.config.tie_word_embeddings:
            assert self.lm_head.weight is not None
            found[f"{names.head}.weight"] = Rows.of(self.lm_head.weight)
        if self.lm_head.bias is not None:
            found[f"{names.head}.bias"] = Rows.of(self.lm_head.bias)
        for index, layer in enumerate(self.layers):
            found |= layer.destinations(f"{prefix}{names.layers}.{index}")
        return found


def stream_eps(config: DecoderConfig) -> float:
    """``eps`` of norms that read the residual stream.

    The stream is kept divided by ``residual_scale``: layers then add to it as they are, and embeddings are divided too.
    A norm cancels the division, if its ``eps`` is divided by the square.
    """
    return config.norm_eps / config.residual_scale**2


def make_norm(config: DecoderConfig, eps: float, ops: TorchLayerOps, dtype: torch.dtype, device: torch.device) -> Norm:
    size = config.hidden_size
    if config.norm == "rms":
        return RMSNorm(size, eps, ops, dtype=dtype, device=device)
    has_weight, has_bias = config.norm_weight, config.norm_bias
    return LayerNorm(size, eps, dtype=dtype, device=device, has_weight=has_weight, has_bias=has_bias)


def norm_destinations(name: str, norm: Norm, offset: float) -> dict[str, Destination]:
    """Checkpoint name -> destination, for a norm's weight and bias."""
    found: dict[str, Destination] = {}
    if norm.weight is not None:
        weight = Rows.of(norm.weight)
        found[f"{name}.weight"] = Shifted(weight, offset) if offset else weight
    if norm.bias is not None:
        found[f"{name}.bias"] = Rows.of(norm.bias)
    return found
