"""Triton attention over a work list. The README in this folder has the maths.

A program is an item and a KV head. Items of few and of many rows use different tiles in one launch, so that
memory-bound and compute-bound parts of a step overlap.
"""

import triton
import triton.language as tl

from neaptide.kernels.block_entries import slot_of

NO_SCORE: tl.constexpr = tl.constexpr(-1e30)
"""Score of a row that has seen no key: finite, because a difference of infinities is NaN."""
ITEM_COLUMNS: tl.constexpr = tl.constexpr(5)
MERGE_COLUMNS: tl.constexpr = tl.constexpr(3)


@triton.jit
def attend_item(
    query,
    kv_cache,
    out,
    parts,
    part_scales,
    item,
    table,
    row_tokens,
    row_limits,
    row_parts,
    kv_head,
    query_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Computes one item: [ROWS, LANES] queries against [KEYS, LANES]. A tile's rows are tokens times query heads per KV
    head."""
    first_row = tl.load(item)
    num_rows = tl.load(item + 1) - first_row
    table += tl.load(item + 2)
    first_key = tl.load(item + 3)
    last_key = tl.load(item + 4)
    lanes = tl.arange(0, LANES)
    is_dim = lanes < DIM
    place = tl.arange(0, ROWS)
    is_row = place < num_rows * GROUP
    row = first_row + place // GROUP
    head = kv_head * GROUP + place % GROUP
    token = tl.load(row_tokens + row, mask=is_row, other=0).to(tl.int64)
    limit = tl.minimum(tl.load(row_limits + row, mask=is_row, other=0), last_key)
    is_used = is_row[:, None] & is_dim[None, :]
    q = tl.load(query + token[:, None] * query_stride + head[:, None] * DIM + lanes[None, :], mask=is_used, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    largest = tl.full([ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, LANES], tl.float32)
    keys_of_head = kv_cache + kv_head * DIM
    values_of_head = kv_cache + (KV_HEADS + kv_head) * DIM
    for start in tl.range(first_key, last_key, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        is_key = key < last_key  # later slots may hold anything; a weight of 0 does not stop NaN
        entry = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
        at = slot_of(entry, key % BLOCK_SIZE, BLOCK_SIZE) * (2 * KV_HEADS * DIM)
        is_stored = is_key[:, None] & is_dim[None, :]
        k = tl.load(keys_of_head + at[:, None] + lanes[None, :], mask=is_stored, other=0.0)
        v = tl.load(values_of_head + at[:, None] + lanes[None, :], mask=is_stored, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(key[None, :] < limit[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        factor = tl.exp2(largest - new_largest)
        total = total * factor + tl.sum(weights, 1)
        values = tl.dot(weights.to(v.dtype), v, values * factor[:, None], input_precision=PRECISION)
        largest = new_largest

    divisor = tl.where(total == 0.0, 1.0, total)  # NaN stays NaN
    values = values / divisor[:, None]
    # The compiler does not know that this is 0, so it does not compute what follows before the loop and keep it in
    # registers.
    place += tl.load(item, volatile=True) - first_row
    is_row = place < num_rows * GROUP
    row = first_row + place // GROUP
    head = kv_head * GROUP + place % GROUP
    is_used = is_row[:, None] & is_dim[None, :]
    if tl.load(row_parts + first_row) < 0:  # either all rows of an item have parts, or none has
        token = tl.load(row_tokens + row, mask=is_row, other=0).to(tl.int64)
        at = (token * (KV_HEADS * GROUP) + head)[:, None] * DIM + lanes[None, :]
        tl.store(out + at, values.to(out.dtype.element_ty), mask=is_used)
    else:
        part = tl.load(row_parts + row, mask=is_row, other=0).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(parts + part[:, None] * DIM + lanes[None, :], values, mask=is_used)
        tl.store(part_scales + part, tl.where(total == 0.0, NO_SCORE, largest + tl.log2(divisor)), mask=is_row)


@triton.jit
def attend_kernel(
    query,
    kv_cache,
    out,
    parts,
    part_scales,
    items,
    table,
    row_tokens,
    row_limits,
    row_parts,
    query_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDE_ROWS: tl.constexpr,
    WIDE_KEYS: tl.constexpr,
    NARROW_ROWS: tl.constexpr,
    NARROW_KEYS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Runs items * KV_HEADS programs, heads first, so that neighbours read the same slots.

    Args:
        query: [tokens, KV_HEADS * GROUP, DIM], ``query_stride`` elements per token.
        kv_cache: [blocks, BLOCK_SIZE, 2 * KV_HEADS, DIM], key heads before value heads.
        out: [tokens, KV_HEADS * GROUP, DIM].
        parts: [parts, KV_HEADS * GROUP, DIM] fp32, for tokens that several items compute.
        part_scales: [parts, KV_HEADS * GROUP] fp32, log2 of the sum of weights.
        items: [items, 5] int32: first row, last row, offset into the table, first key, last key.
        table: int32 entries of all requests' block tables.
        row_tokens, row_limits, row_parts: [rows] int32 as in ``WorkList``.
        scale: score factor for base 2: log2(e) / sqrt(DIM).
        PRECISION: of fp32 products.
        UPCAST: widen first, for an interpreter that cannot multiply the cache's type.
    """
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    item = items + (program // KV_HEADS) * ITEM_COLUMNS
    num_rows = tl.load(item + 1) - tl.load(item)
    if num_rows * GROUP > NARROW_ROWS:
        attend_item(
            query,
            kv_cache,
            out,
            parts,
            part_scales,
            item,
            table,
            row_tokens,
            row_limits,
            row_parts,
            kv_head,
            query_stride,
            scale,
            KV_HEADS,
            GROUP,
            DIM,
            BLOCK_SIZE,
            WIDE_ROWS,
            WIDE_KEYS,
            LANES,
            STAGES,
            PRECISION,
            UPCAST,
        )
    elif num_rows > 0:
        attend_item(
            query,
            kv_cache,
            out,
            parts,
            part_scales,
            item,
            table,
            row_tokens,
            row_limits,
            row_parts,
            kv_head,
            query_stride,
            scale,
            KV_HEADS,
            GROUP,
            DIM,
            BLOCK_SIZE,
            NARROW_ROWS,
            NARROW_KEYS,
            LANES,
            STAGES,
            PRECISION,
            UPCAST,
        )


@triton.jit
def merge_kernel(out, parts, part_scales, merges, HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr):
    """Runs merges * HEADS programs. ``merges`` is [merges, 3] int32: token, first part, last part; equal parts mean
    none."""
    program = tl.program_id(0)
    head = program % HEADS
    merge = merges + (program // HEADS) * MERGE_COLUMNS
    token = tl.load(merge).to(tl.int64)
    first_part = tl.load(merge + 1)
    last_part = tl.load(merge + 2)
    lanes = tl.arange(0, LANES)
    is_dim = lanes < DIM
    at = first_part.to(tl.int64) * HEADS + head
    largest = tl.load(part_scales + at)
    values = tl.load(parts + at * DIM + lanes, mask=is_dim, other=0.0)
    total = tl.exp2(largest - largest)
    for _ in range(first_part + 1, last_part):
        at += HEADS
        scale = tl.load(part_scales + at)
        new_largest = tl.maximum(largest, scale)
        factor = tl.exp2(largest - new_largest)
        weight = tl.exp2(scale - new_largest)
        values = values * factor + weight * tl.load(parts + at * DIM + lanes, mask=is_dim, other=0.0)
        total = total * factor + weight
        largest = new_largest
    is_stored = lanes < tl.minimum(last_part - first_part, 1) * DIM
    tl.store(out + (token * HEADS + head) * DIM + lanes, (values / total).to(out.dtype.element_ty), mask=is_stored)
