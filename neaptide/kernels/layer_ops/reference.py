"""Layer operations in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from neaptide.kernels.paged_attention.reference import HasSlots, write_kv


class TorchLayerOps:
    """Layer operations for any device and any float type."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension of [num_tokens, size]."""
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, weight.shape, weight, eps)
        # On a CPU, torch's rms_norm makes five passes: 0.77 ms for 512 x 576 on one core. This takes 0.30 ms.
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # [num_tokens, 1]
        scale: Tensor = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        scaled: Tensor = x * scale
        return scaled.mul_(weight)

    def norm_heads_(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """RMS norm of each head of [num_tokens, num_heads, head_dim], in place, with one weight [head_dim]."""
        if heads.dtype != torch.float32 or heads.device.type != "cpu":
            heads.copy_(F.rms_norm(heads, weight.shape, weight, eps))
            return
        norm: Tensor = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)  # [num_tokens, num_heads, 1]
        heads.mul_(norm.square_().mul_(1 / heads.shape[-1]).add_(eps).rsqrt_()).mul_(weight)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * size], gates first -> ``silu(gate) * up``, [num_tokens, size]; may overwrite its input."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate, inplace=True).mul_(up)

    def rotate_(self, heads: Tensor, rotation: Tensor) -> None:
        """Rotates the interleaved pairs of [num_tokens, num_heads, head_dim] in place.

        Args:
            heads: every head is contiguous.
            rotation: [num_tokens, 1, head_dim / 2] complex64.
        """
        pairs = heads.view(*heads.shape[:2], -1, 2)  # [num_tokens, num_heads, head_dim / 2, 2]
        if heads.dtype == torch.float32:
            torch.view_as_complex(pairs).mul_(rotation)
        else:  # torch has no complex bf16: rotate in fp32 and round once
            pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotation))

    def rotate_and_store(self, qkv: Tensor, rotation: Tensor | None, kv_cache: Tensor, plan: HasSlots) -> None:
        """Rotates queries and keys in place, then writes keys and values to the cache.

        Args:
            qkv: [num_tokens, heads of queries, keys and values, head_dim], contiguous.
            rotation: as for ``rotate_``; None skips the rotation.
            kv_cache: [num_blocks, block_size, 2 * num_kv_heads, head_dim].
            plan: of the step; has each token's slot.
        """
        stored = kv_cache.shape[2]
        if rotation is not None:
            self.rotate_(qkv[:, : -(stored // 2)], rotation)
        write_kv(kv_cache, qkv[:, -stored:], plan)
