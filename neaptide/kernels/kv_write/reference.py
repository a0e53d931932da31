"""Where tokens are written and how they are rotated, in plain torch: what the kernel is measured against."""

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where the tokens of a step lie, on the device; all int32."""

    table: Tensor
    """Of all requests: entries, ``block * 2 + is_reversed``. Such a block has its tokens from its last slot back."""
    token_tables: Tensor
    """[tokens] where a token's own table begins in ``table``."""
    token_limits: Tensor
    """[tokens] a token's position and 1."""


def slots_of(places: Places, block_size: int) -> Tensor:
    """[tokens] int64."""
    positions = places.token_limits.long() - 1
    entries = places.table.flatten()[places.token_tables.long() + positions // block_size].long()
    offsets = positions % block_size
    return entries // 2 * block_size + torch.where(entries % 2 == 1, block_size - 1 - offsets, offsets)


def write(heads: Tensor, rotation: Tensor | None, kv_cache: Tensor, places: Places) -> None:
    """Rotates queries and keys in place, interleaved pairs as complex numbers, and stores keys and values.

    Args:
        heads: [tokens, query heads + 2 * kv_heads, dim]: of queries, keys and values.
        rotation: [tokens, 1, dim / 2] complex64; None rotates nothing.
        kv_cache: [blocks, block_size, 2 * kv_heads, dim].
        places: of the tokens.
    """
    stored = kv_cache.shape[2]
    if rotation is not None:
        turned = heads[:, : heads.shape[1] - stored // 2]
        pairs = turned.reshape(*turned.shape[:2], -1, 2).float()
        turned.copy_(torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(2))
    kv_cache.view(-1, *kv_cache.shape[2:])[slots_of(places, kv_cache.shape[1])] = heads[:, heads.shape[1] - stored :]
