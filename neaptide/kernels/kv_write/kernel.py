"""Triton kernel that rotates queries and keys and writes keys and values, one launch per layer."""

import triton
import triton.language as tl

from neaptide.kernels.block_entries import slot_of


@triton.jit
def write_kernel(
    heads,
    rotation,
    kv_cache,
    table,
    token_tables,
    token_limits,
    token_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Runs tokens * (heads / HEADS_EACH, rounded up) programs.

    Args:
        heads: [tokens, QUERY_HEADS + 2 * KV_HEADS, DIM], ``token_stride`` elements per token; rotated in place.
        rotation: [tokens, DIM / 2, 2] fp32, cosines and sines; read only if ROTATES.
        kv_cache: [blocks, BLOCK_SIZE, 2 * KV_HEADS, DIM].
        table: int32 entries of all requests' block tables.
        token_tables: [tokens] int32, start of the token's block table in ``table``.
        token_limits: [tokens] int32, the token's position + 1.
    """
    pieces: tl.constexpr = (QUERY_HEADS + 2 * KV_HEADS + HEADS_EACH - 1) // HEADS_EACH
    program = tl.program_id(0)
    token = (program // pieces).to(tl.int64)
    head = (program % pieces) * HEADS_EACH + tl.arange(0, HEADS_EACH)
    lanes = tl.arange(0, 2 * PAIRS)
    is_dim = lanes < DIM
    is_used = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & is_dim[None, :]
    at = heads + token * token_stride + head[:, None] * DIM + lanes[None, :]
    x = tl.load(at, mask=is_used, other=0.0)
    if ROTATES:
        angle = tl.load(rotation + token * DIM + lanes, mask=is_dim, other=0.0)
        cosine, sine = tl.split(tl.reshape(angle, [PAIRS, 2]))
        first, second = tl.split(tl.reshape(x.to(tl.float32), [HEADS_EACH, PAIRS, 2]))
        new_first = first * cosine[None, :] - second * sine[None, :]
        new_second = first * sine[None, :] + second * cosine[None, :]
        turned = tl.reshape(tl.join(new_first, new_second), [HEADS_EACH, 2 * PAIRS]).to(heads.dtype.element_ty)
        is_turned = (head < QUERY_HEADS + KV_HEADS)[:, None]
        x = tl.where(is_turned, turned, x)
        tl.store(at, x, mask=is_used & is_turned)
    position = tl.load(token_limits + token) - 1
    entry = tl.load(table + tl.load(token_tables + token) + position // BLOCK_SIZE)
    slot = slot_of(entry, position % BLOCK_SIZE, BLOCK_SIZE)
    to = kv_cache + slot * (2 * KV_HEADS * DIM) + (head - QUERY_HEADS)[:, None] * DIM + lanes[None, :]
    tl.store(to, x, mask=is_used & (head >= QUERY_HEADS)[:, None])
