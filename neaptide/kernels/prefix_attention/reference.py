"""Attention over a work list in plain torch, item by item, in fp32: the reference for the kernel's tests."""

import numpy as np
import torch
from torch import Tensor

from neaptide.kernels.paged_attention.tables import IntArray
from neaptide.kernels.paged_attention.work_list import WorkList


def slots_of(entries: IntArray, block_size: int) -> IntArray:
    """[blocks] entries, ``block * 2 + is_reversed`` -> [blocks * block_size] slots."""
    offsets = np.arange(block_size)
    offsets = np.where(entries[:, None] % 2 == 1, offsets[::-1], offsets)
    slots: IntArray = (entries[:, None] // 2 * block_size + offsets).reshape(-1)
    return slots


def attend(query: Tensor, kv_cache: Tensor, work: WorkList, entries: IntArray) -> Tensor:
    """Attention of each token of the step.

    Args:
        query: [tokens, heads, dim].
        kv_cache: [blocks, block_size, 2 * kv_heads, dim], key heads before value heads.
        work: of the step.
        entries: [blocks of all requests], as in ``slots_of``.

    Returns:
        [tokens, heads, dim] fp32.
    """
    num_tokens, heads, dim = query.shape
    slots = torch.from_numpy(slots_of(entries, kv_cache.shape[1])).to(kv_cache.device)
    row_tokens, row_limits, row_parts = (
        torch.from_numpy(each).to(query.device) for each in (work.row_tokens, work.row_limits, work.row_parts)
    )
    out = torch.full((num_tokens, heads, dim), float("nan"), device=query.device)
    num_parts = int(work.merges[:, 2].max(initial=0))
    parts = torch.full((num_parts, heads, dim), float("nan"), device=query.device)
    scales = torch.full((num_parts, heads), float("nan"), device=query.device)
    for first_row, last_row, table, first_key, last_key in work.items.tolist():
        rows = slice(first_row, last_row)
        begin = table * kv_cache.shape[1]
        keys_and_values = kv_cache.flatten(0, 1)[slots[begin + first_key : begin + last_key]]
        is_seen = torch.arange(first_key, last_key, device=query.device) < row_limits[rows, None]
        values, scale = _attend_item(query[row_tokens[rows].long()].float(), keys_and_values.float(), is_seen)
        has_part = row_parts[rows] >= 0
        out[row_tokens[rows][~has_part].long()] = values[~has_part]
        parts[row_parts[rows][has_part].long()] = values[has_part]
        scales[row_parts[rows][has_part].long()] = scale[has_part]
    for token, first_part, last_part in work.merges.tolist():
        weights = torch.softmax(scales[first_part:last_part], dim=0)  # [parts, heads]
        out[token] = (weights[..., None] * parts[first_part:last_part]).sum(0)
    return out


def _attend_item(query: Tensor, keys_and_values: Tensor, is_seen: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, heads, dim] over [keys, 2 * kv_heads, dim] -> values [rows, heads, dim], log-sum-exp [rows, heads].

    A row that sees no key gets -inf and values of 0.
    """
    kv_heads = keys_and_values.shape[1] // 2
    group = query.shape[1] // kv_heads
    keys, values = keys_and_values.repeat_interleave(group, dim=1).chunk(2, dim=1)  # [keys, heads, dim]
    scores = torch.einsum("rhd,khd->rhk", query, keys) / query.shape[2] ** 0.5
    scores = scores.masked_fill(~is_seen[:, None], float("-inf"))
    scale = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - scale[..., None]).masked_fill(~is_seen[:, None], 0.0)
    return torch.einsum("rhk,khd->rhd", weights, values), scale
