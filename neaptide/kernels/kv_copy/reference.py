"""Copies of KV slots in torch, for any device."""

from torch import Tensor


def gather(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """[layers, slots of the cache, heads, dim], [slots] int64 -> [slots, layers, heads, dim], contiguous."""
    return kv_cache.transpose(0, 1).index_select(0, slots)


def scatter(kv_cache: Tensor, slots: Tensor, copied: Tensor) -> None:
    """Writes ``copied`` [slots, layers, heads, dim] back to the cache. ``slots`` must be distinct."""
    kv_cache.index_copy_(1, slots, copied.transpose(0, 1))
