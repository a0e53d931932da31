"""Rotation and KV writes in plain torch: the reference for the kernel's tests."""

from typing import NamedTuple

import torch
from torch import Tensor


class WritePlaces(NamedTuple):
    """Cache positions of a step's tokens, on the device; all int32."""

    table: Tensor
    """Block table entries of all requests, ``block * 2 + is_reversed``. A reversed block is filled from its
    last slot."""
    token_tables: Tensor
    """[tokens] Start of the token's block table in ``table``."""
    token_limits: Tensor
    """[tokens] The token's position + 1."""


def slots_of(places: WritePlaces, block_size: int) -> Tensor:
    """[tokens] int64, the cache slot of each token."""
    positions = places.token_limits.long() - 1
    entries = places.table.flatten()[places.token_tables.long() + positions // block_size].long()
    offsets = positions % block_size
    return entries // 2 * block_size + torch.where(entries % 2 == 1, block_size - 1 - offsets, offsets)


def write(heads: Tensor, rotation: Tensor | None, kv_cache: Tensor, places: WritePlaces) -> None:
    """Rotates queries and keys in place and stores keys and values. Interleaved pairs rotate as complex numbers.

    Args:
        heads: [tokens, query heads + 2 * kv_heads, dim]: queries, keys, values.
        rotation: [tokens, 1, dim / 2] complex64; None skips the rotation.
        kv_cache: [blocks, block_size, 2 * kv_heads, dim].
        places: the tokens' cache positions.
    """
    stored = kv_cache.shape[2]
    if rotation is not None:
        turned = heads[:, : heads.shape[1] - stored // 2]
        pairs = turned.reshape(*turned.shape[:2], -1, 2).float()
        turned.copy_(torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(2))
    kv_cache.view(-1, *kv_cache.shape[2:])[slots_of(places, kv_cache.shape[1])] = heads[:, heads.shape[1] - stored :]
