"""Turns a step plan into tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from neaptide.engine.arrays import IntArray
from neaptide.engine.kv.block_table import Entries
from neaptide.engine.steps.plan import StepPlan
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID, RequestTable
from neaptide.executors.torch.placeholders import SampledRow, fill_
from neaptide.kernels.paged_attention import AttentionPlanner, StepAttention, StepTables
from neaptide.kernels.transfer import to_device

SampledToken = Callable[[str, int], SampledRow | None]
"""Finds a request's token at this position of prompt and output on the device; None if it is not there."""


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step, requests back to back. Decodes come first, by context length, so that attention pads little."""

    parts: IntArray
    """[requests] Index of each request's part in the plan."""
    request_ids: list[str]
    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64."""
    query_starts: IntArray
    """[requests + 1] Token rows of request i are ``query_starts[i] : query_starts[i + 1]``."""
    attention: StepAttention
    invalid: list[str]
    """Requests with a token id outside the vocabulary. Their rows compute token 0 and must not be used."""

    @property
    def last_rows(self) -> IntArray:
        """[requests] Token row of each request's last position."""
        return self.query_starts[1:] - 1


def build_input_batch(
    plan: StepPlan,
    plan_attention: AttentionPlanner,
    vocab_size: int,
    device: torch.device,
    sampled_token: SampledToken,
) -> InputBatch:
    """Lays out a step's requests.

    Args:
        plan: of at least one request; its table is not read later.
        plan_attention: plans attention for the step's requests.
        vocab_size: upper bound of token ids.
        device: of the model.
        sampled_token: finds the token that a placeholder stands for.
    """
    parts = _decodes_by_length(plan)
    rows, query_lens, context_lens = plan.rows[parts], plan.num_tokens[parts], plan.num_computed[parts]
    request_ids = [plan.request_ids[part] for part in parts.tolist()]
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - context_lens, query_lens)
    token_ids = plan.table.tokens[np.repeat(rows, query_lens), positions].astype(np.int64)
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    invalid: dict[str, None] = {}
    filled_rows: list[int] = []
    sources: list[SampledRow] = []
    if outside.any():
        for row in np.flatnonzero(outside).tolist():
            request_id = request_ids[int(np.searchsorted(starts, row, side="right")) - 1]
            is_placeholder = token_ids[row] == PLACEHOLDER_TOKEN_ID
            source = sampled_token(request_id, int(positions[row])) if is_placeholder else None
            if source is None:
                invalid[request_id] = None
            else:
                filled_rows.append(row)
                sources.append(source)
        token_ids[outside] = 0
    device_token_ids = to_device(torch.from_numpy(token_ids), device)
    fill_(device_token_ids, filled_rows, sources)
    return InputBatch(
        parts,
        request_ids,
        device_token_ids,
        to_device(torch.from_numpy(positions), device),
        starts,
        plan_attention(query_lens, context_lens + query_lens, _block_tables(plan.table, rows)),
        list(invalid),
    )


def _decodes_by_length(plan: StepPlan) -> IntArray:
    """The plan's parts: decodes by context length, then the others in the plan's order."""
    is_decode = (plan.num_tokens == 1) & (plan.num_computed > 0)
    return np.argsort(np.where(is_decode, plan.num_computed, 1 << 62), kind="stable")


def _block_tables(table: RequestTable, rows: IntArray) -> StepTables:
    """The rows' block tables, without unused entries."""
    sizes, ids = table.blocks.num_blocks[rows], table.blocks.ids
    ends = sizes.cumsum()
    starts = ends - sizes
    places = np.repeat(rows * ids.shape[1] - starts, sizes)
    places += np.arange(len(places))
    blocks, are_reversed = Entries.of(ids.take(places))
    return StepTables(2 * blocks + are_reversed, starts)
