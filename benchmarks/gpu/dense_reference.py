"""A Llama over one whole sequence, written as simply as possible, as the reference of the paged executor."""

import torch
from torch import Tensor

from benchmarks.gpu.random_llama import RMS_NORM_EPS, ROPE_THETA, LlamaShape


def dense_logits(weights: dict[str, Tensor], shape: LlamaShape, token_ids: list[int]) -> Tensor:
    """[len(token_ids), vocab]; computed in fp32 on the weights' device, without a cache or fused kernels."""
    embedding = weights["model.embed_tokens.weight"].float()
    hidden = embedding[torch.tensor(token_ids, device=embedding.device)]
    for layer in range(shape.layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): weight.float()
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        hidden = hidden + _attention(_norm(hidden, own["input_layernorm.weight"]), own, shape)
        hidden = hidden + _feed_forward(_norm(hidden, own["post_attention_layernorm.weight"]), own)
    return _norm(hidden, weights["model.norm.weight"].float()) @ weights["lm_head.weight"].float().T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_NORM_EPS) * weight


def _feed_forward(x: Tensor, own: dict[str, Tensor]) -> Tensor:
    gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T


def _attention(x: Tensor, own: dict[str, Tensor], shape: LlamaShape) -> Tensor:
    tokens, dim = x.shape[0], shape.head_dim
    query = _rotate((x @ own["self_attn.q_proj.weight"].T).view(tokens, -1, dim).transpose(0, 1))
    key = _rotate((x @ own["self_attn.k_proj.weight"].T).view(tokens, -1, dim).transpose(0, 1))
    value = (x @ own["self_attn.v_proj.weight"].T).view(tokens, -1, dim).transpose(0, 1)
    repeats = shape.heads // shape.kv_heads
    key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
    scores = query @ key.transpose(1, 2) * dim**-0.5  # [heads, tokens, tokens]
    hidden_future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    attended = scores.masked_fill(hidden_future, float("-inf")).softmax(-1) @ value
    return attended.transpose(0, 1).reshape(tokens, -1) @ own["self_attn.o_proj.weight"].T


def _rotate(heads: Tensor) -> Tensor:
    """Rotary embedding of [heads, tokens, dim]: dimension i is paired with i + dim/2."""
    tokens, dim = heads.shape[1:]
    # On the CPU in fp32, as in training: large angles depend on the rounding of the frequencies.
    inverse_frequencies = 1.0 / ROPE_THETA ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(tokens).float(), inverse_frequencies).to(heads.device)
    cos, sin = angles.cos(), angles.sin()
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
