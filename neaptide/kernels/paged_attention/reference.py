"""Paged attention in plain torch: gather blocks, then scaled-dot-product attention.

A layer's cache is [num_blocks, block_size, 2 * num_kv_heads, head_dim], key heads before value heads. Keys and values
are stored together because a fused QKV projection produces them side by side. One gather and one write then serve both.

A step is a ragged batch, one request after the other. `plan_attention` does once per step what all layers share.
Requests that compute one token on cached context are *decodes*. Neighbouring decodes are padded to a common length and
run together; the query heads of a KV head take the place of query positions. Everything else is a *chunk* and runs
alone, causal after its cached context.

Slots without a token may hold anything, NaN included. They are cleared in the gathered copy, because a mask alone does
not stop NaN (0 * NaN and NaN - inf are NaN).

A reversed block stores its tokens from its last slot backwards. Requests with such blocks are gathered slot by slot.
The result is the same to the bit as with plain blocks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from neaptide.kernels.paged_attention.tables import BoolArray, IntArray, StepTables
from neaptide.kernels.transfer import to_device

_SCRATCH_TOKENS = 2048
"""Context tokens gathered at once for decodes.

The copy then stays in the CPU's cache until it is read again. A step of 32 decodes on 300 tokens of the 111M shape is a
fifth faster than with one gather for all.
"""
_PADDING_RATIO = 1.25
"""Decodes are padded together while the gather stays within this multiple of their own blocks."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Neighbouring one-token requests, padded to the longest."""

    start: int
    stop: int
    """The group's token rows in the step are ``start`` to ``stop``, one per request."""
    block_ids: Tensor
    """[requests * blocks_each] int64; padding repeats a request's last block."""
    slot_ids: Tensor | None
    """[requests * blocks_each * block_size] int64, the slots of ``block_ids``; None if no block is reversed."""
    mask: Tensor
    """[requests, 1, 1, blocks_each * block_size], 0 or -inf, in the queries' dtype."""
    unused: Tensor
    """[n] int64: gathered positions that hold no token of the request."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Several tokens of one request, or its very first token."""

    start: int
    stop: int
    seq_len: int
    """Keys after this step, including the chunk's own."""
    block_ids: Tensor | None
    """[blocks] int64 that cover ``seq_len``; None if the keys are the chunk's own, which the step has at hand."""
    slot_ids: Tensor | None
    """[seq_len] int64, the slots of ``block_ids``; None if no block is reversed."""
    mask: Tensor | None
    """[stop - start, seq_len], 0 or -inf; None means causal."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan that a step's layers share."""

    slots: Tensor
    """[num_tokens] int64: block_id * block_size + offset of each token."""
    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]
    scratch_blocks: int
    """Blocks of the largest decode group."""

    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor:
        """See ``paged_attention``."""
        return paged_attention(query, key_value, kv_cache, self)


class HasSlots(Protocol):
    @property
    def slots(self) -> Tensor:
        """[num_tokens] int64, on the cache's device: where each token's keys and values are written."""
        ...


def plan_attention(
    query_lens: IntArray,
    seq_lens: IntArray,
    tables: StepTables,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Splits a step into decode groups and chunks.

    Grouping works best if neighbours have similar lengths; any order is correct.

    Args:
        query_lens: [requests] tokens computed in this step, each > 0.
        seq_lens: [requests] context after this step.
        tables: block tables of these requests.
        block_size: tokens per block.
        dtype: of the queries.
        device: of the cache.
    """
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - (seq_lens - query_lens), query_lens)
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    slots = tables.slots(rows, positions, block_size)
    is_decode = (query_lens == 1) & (seq_lens > 1)
    blocks = -(-seq_lens // block_size)
    decodes = _plan_decodes(starts, seq_lens, tables, is_decode, blocks, block_size, dtype, device)
    chunks = [
        plan_chunk(
            int(starts[row]),
            int(query_lens[row]),
            int(seq_lens[row]),
            tables.entries[tables.starts[row] : tables.starts[row] + blocks[row]],
            block_size,
            dtype,
            device,
        )
        for row in np.flatnonzero(~is_decode).tolist()
    ]
    scratch_blocks = max((group.block_ids.shape[0] for group in decodes), default=0)
    return AttentionPlan(to_device(torch.from_numpy(slots), device), decodes, chunks, scratch_blocks)


def write_kv(kv_cache: Tensor, key_value: Tensor, plan: HasSlots) -> None:
    """Stores the step's keys and values, [num_tokens, 2 * num_kv_heads, head_dim], in their slots."""
    kv_cache.view(-1, *kv_cache.shape[2:]).index_copy_(0, plan.slots, key_value)


def paged_attention(query: Tensor, key_value: Tensor, kv_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention of each token of the step over its request's context, scaled by 1/sqrt(head_dim).

    Args:
        query: [num_tokens, num_heads, head_dim].
        key_value: [num_tokens, 2 * num_kv_heads, head_dim], the step's own, already written to the cache.
        kv_cache: [num_blocks, block_size, 2 * num_kv_heads, head_dim].
        plan: of this step.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if plan.decodes:
        # One buffer for all groups: page faults on fresh memory cost more than the gather itself.
        scratch = kv_cache.new_empty(plan.scratch_blocks, *kv_cache.shape[1:])
        for group in plan.decodes:
            out[group.start : group.stop] = _decode(query[group.start : group.stop], kv_cache, group, scratch)
    for chunk in plan.chunks:
        attend_chunk(out, query, key_value, kv_cache, chunk)
    return out


def attend_chunk(out: Tensor, query: Tensor, key_value: Tensor, kv_cache: Tensor, chunk: PrefillChunk) -> None:
    """Writes the attention of a chunk to its rows of ``out``. The arguments are those of ``paged_attention``."""
    rows = slice(chunk.start, chunk.stop)
    if chunk.block_ids is None:
        context = key_value[rows]
    elif chunk.slot_ids is not None:
        context = kv_cache.flatten(0, 1).index_select(0, chunk.slot_ids)
    else:
        context = kv_cache.index_select(0, chunk.block_ids).flatten(0, 1)[: chunk.seq_len]
    out[rows] = _prefill(query[rows], context, chunk.mask)


def _decode(query: Tensor, kv_cache: Tensor, group: DecodeGroup, scratch: Tensor) -> Tensor:
    """[requests, num_heads, head_dim] -> the same."""
    requests, kv_heads = query.shape[0], kv_cache.shape[2] // 2
    gathered = scratch[: group.block_ids.shape[0]]
    slots = gathered.view(-1, *kv_cache.shape[2:])  # [requests * L, 2 * kv_heads, dim]
    if group.slot_ids is None:
        torch.index_select(kv_cache, 0, group.block_ids, out=gathered)
    else:
        torch.index_select(kv_cache.flatten(0, 1), 0, group.slot_ids, out=slots)
    slots.index_fill_(0, group.unused, 0.0)
    context = slots.view(requests, -1, *slots.shape[1:]).transpose(1, 2)  # [requests, 2 * kv_heads, L, dim]
    grouped = query.view(requests, kv_heads, -1, query.shape[2])  # [requests, kv_heads, heads per KV head, dim]
    attended = F.scaled_dot_product_attention(
        grouped, context[:, :kv_heads], context[:, kv_heads:], attn_mask=group.mask
    )
    return attended.flatten(1, 2)


def _prefill(query: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
    """[tokens, num_heads, head_dim] over [seq_len, 2 * num_kv_heads, head_dim] -> [tokens, num_heads, head_dim]."""
    kv_heads = context.shape[1] // 2
    heads_per_kv = query.shape[1] // kv_heads
    # KV heads take the batch dimension, so that a group's shared keys expand without a copy.
    grouped = query.view(-1, kv_heads, heads_per_kv, query.shape[2])
    grouped = grouped.permute(1, 2, 0, 3)  # [kv_heads, heads per KV head, tokens, dim]
    by_head = context.transpose(0, 1).unsqueeze(1).expand(-1, heads_per_kv, -1, -1)
    attended = F.scaled_dot_product_attention(
        grouped, by_head[:kv_heads], by_head[kv_heads:], attn_mask=mask, is_causal=mask is None
    )
    return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _group_decodes(is_decode: BoolArray, blocks: IntArray, max_blocks: int) -> list[tuple[int, int, int]]:
    """Runs [first, last) of neighbouring decodes within the limits on padding and scratch, each with its most
    blocks."""
    groups: list[tuple[int, int, int]] = []
    first, longest, own = 0, 0, 0
    for row, (decode, count) in enumerate(zip(is_decode.tolist(), blocks.tolist(), strict=True)):
        size = row - first
        padded = max(longest, count) * (size + 1)
        joins = size > 0 and padded <= max_blocks and padded <= _PADDING_RATIO * (own + count)
        if size > 0 and not (decode and joins):
            groups.append((first, row, longest))
            size = 0
        if not decode:
            first, longest, own = row + 1, 0, 0
        elif size == 0:
            first, longest, own = row, count, count
        else:
            longest, own = max(longest, count), own + count
    if first < len(blocks):
        groups.append((first, len(blocks), longest))
    return groups


def _plan_decodes(
    starts: IntArray,
    seq_lens: IntArray,
    tables: StepTables,
    is_decode: BoolArray,
    blocks: IntArray,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[DecodeGroup]:
    """Decode groups. ``starts`` [requests + 1]: first token row of each request; ``blocks`` [requests]: context
    blocks."""
    groups, has_reversed = [], np.count_nonzero(tables.entries & 1) > 0
    for first, last, width in _group_decodes(is_decode, blocks, max(1, _SCRATCH_TOKENS // block_size)):
        entries = tables.padded(first, last, blocks[first:last], width)
        lens, row = seq_lens[first:last], int(starts[first])
        groups.append(_decode_group(row, lens, entries, bool(has_reversed), block_size, dtype, device))
    return groups


def _decode_group(
    start: int,
    seq_lens: IntArray,
    entries: IntArray,
    has_reversed: bool,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    """One decode group. ``entries`` [requests * blocks_each]: padded tables; ``has_reversed``: the step has reversed
    blocks."""
    blocks = len(entries) // len(seq_lens)
    unused = np.arange(blocks * block_size) >= seq_lens[:, None]  # [requests, L]
    slot_ids = None
    if has_reversed and np.count_nonzero(entries & 1):
        positions = np.tile(np.arange(blocks * block_size), len(seq_lens))
        rows = np.repeat(np.arange(len(seq_lens)), blocks * block_size)
        slot_ids = StepTables(entries, np.arange(len(seq_lens)) * blocks).slots(rows, positions, block_size)
    mask = torch.zeros(unused.shape, dtype=dtype).masked_fill_(torch.from_numpy(unused), float("-inf"))
    return DecodeGroup(
        start,
        start + len(seq_lens),
        to_device(torch.from_numpy(entries >> 1), device),
        None if slot_ids is None else to_device(torch.from_numpy(slot_ids), device),
        to_device(mask[:, None, None], device),
        to_device(torch.from_numpy(np.flatnonzero(unused)), device),
    )


def plan_chunk(
    start: int,
    query_len: int,
    seq_len: int,
    entries: IntArray,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    from_cache: bool = False,
) -> PrefillChunk:
    """A chunk of ``query_len`` tokens from row ``start`` on.

    Args:
        seq_len: its keys, including its own.
        entries: the request's block table, up to ``seq_len``.
        from_cache: read its own keys and values from the cache, where there are none before them, too.
    """
    context_len, mask = seq_len - query_len, None
    if context_len == 0 and not from_cache:
        return PrefillChunk(start, start + query_len, seq_len, None, None, None)
    if context_len:
        mask = torch.full((query_len, seq_len), float("-inf"), dtype=dtype, device=device).triu_(context_len + 1)
    block_ids = to_device(torch.from_numpy(entries >> 1), device)
    slot_ids = None
    if np.count_nonzero(entries & 1):
        own = StepTables(entries, np.zeros(1, np.int64))
        slots = own.slots(np.zeros(seq_len, np.int64), np.arange(seq_len), block_size)
        slot_ids = to_device(torch.from_numpy(slots), device)
    return PrefillChunk(start, start + query_len, seq_len, block_ids, slot_ids, mask)
