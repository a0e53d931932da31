"""Launches the write kernel with the signature of ``reference``. Imports Triton."""

import torch
from torch import Tensor

from neaptide.kernels.kv_write.kernel import write_kernel
from neaptide.kernels.kv_write.reference import WritePlaces

HEADS_EACH = 16
"""Heads of a token per program."""


def write(heads: Tensor, rotation: Tensor | None, kv_cache: Tensor, places: WritePlaces) -> None:
    """``reference.write`` in one launch.

    Raises:
        ValueError: the tensors' shapes or types do not match. Nothing has been read.
    """
    tokens, num_heads, dim = heads.shape
    stored = kv_cache.shape[2]
    query_heads = num_heads - stored
    fits = kv_cache.is_contiguous() and kv_cache.shape[3] == dim and heads.stride()[1:] == (dim, 1)
    if not fits or dim % 2 or query_heads < 0 or kv_cache.dtype != heads.dtype:
        raise ValueError(f"heads of shape {tuple(heads.shape)} for a cache of {tuple(kv_cache.shape)}")
    if places.token_tables.shape != (tokens,) or places.token_limits.shape != (tokens,):
        raise ValueError(f"places of {len(places.token_tables)} tokens for {tokens}")
    if rotation is not None and (rotation.shape != (tokens, 1, dim // 2) or rotation.dtype != torch.complex64):
        raise ValueError(f"a rotation of shape {tuple(rotation.shape)}, {rotation.dtype}, for {tuple(heads.shape)}")
    write_kernel[(tokens * -(-num_heads // HEADS_EACH),)](
        heads,
        heads if rotation is None else torch.view_as_real(rotation.contiguous()),
        kv_cache,
        places.table,
        places.token_tables,
        places.token_limits,
        heads.stride(0),
        QUERY_HEADS=query_heads,
        KV_HEADS=stored // 2,
        DIM=dim,
        BLOCK_SIZE=kv_cache.shape[1],
        HEADS_EACH=HEADS_EACH,
        PAIRS=1 << (dim // 2 - 1).bit_length(),
        ROTATES=rotation is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
