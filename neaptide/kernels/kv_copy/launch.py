"""Launches the copy kernel with the signatures of ``reference``. Imports Triton."""

import torch
from torch import Tensor

from neaptide.kernels.kv_copy.kernel import copy_kernel


def gather(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """``reference.gather`` in one launch.

    Raises:
        ValueError: the tensors' shapes or types do not match. Nothing has been read.
    """
    copied = kv_cache.new_empty((len(slots), kv_cache.shape[0], *kv_cache.shape[2:]))
    _launch(kv_cache, slots, copied, into_cache=False)
    return copied


def scatter(kv_cache: Tensor, slots: Tensor, copied: Tensor) -> None:
    """``reference.scatter`` in one launch.

    Raises:
        ValueError: the tensors' shapes or types do not match. Nothing has been written.
    """
    _launch(kv_cache, slots, copied, into_cache=True)


def _launch(kv_cache: Tensor, slots: Tensor, copied: Tensor, *, into_cache: bool) -> None:
    layers, _, *heads = kv_cache.shape
    if copied.shape != (len(slots), layers, *heads) or copied.dtype != kv_cache.dtype or slots.dtype != torch.int64:
        raise ValueError(f"copies of shape {tuple(copied.shape)} for {len(slots)} slots of {tuple(kv_cache.shape)}")
    if not (kv_cache[0].is_contiguous() and copied.is_contiguous() and slots.is_contiguous()):
        raise ValueError("copying KV slots needs contiguous tensors")
    row = kv_cache[0, 0].numel()
    if len(slots):
        copy_kernel[(len(slots) * layers,)](
            kv_cache,
            copied,
            slots,
            kv_cache.stride(0),
            LAYERS=layers,
            ROW=row,
            LANES=1 << (row - 1).bit_length(),
            INTO_CACHE=into_cache,
            num_warps=4,
            enable_fp_fusion=True,
        )
