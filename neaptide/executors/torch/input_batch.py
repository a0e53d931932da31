"""A step plan as tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neaptide.engine.steps.plan import ScheduledRequest
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID
from neaptide.executors.torch.placeholders import SampledRow, fill_
from neaptide.kernels.paged_attention import AttentionPlan, plan_attention
from neaptide.kernels.transfer import to_device

IntArray = npt.NDArray[np.int64]
SampledToken = Callable[[ScheduledRequest, int], SampledRow | None]
"""Where the request's token of this index in ``token_ids`` is, if the device has it."""


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step, requests back to back: decodes first, by context length, so that the kernel pads little."""

    requests: list[ScheduledRequest]
    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64."""
    query_starts: IntArray
    """[requests + 1]: token rows of request i are ``query_starts[i] : query_starts[i + 1]``."""
    attention: AttentionPlan
    invalid: list[str]
    """Requests with a token id outside the vocabulary; their rows compute token 0 and must not be used."""

    @property
    def last_rows(self) -> IntArray:
        """[requests] token row of each request's last position."""
        return self.query_starts[1:] - 1


def build_input_batch(
    scheduled: list[ScheduledRequest],
    block_size: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    sampled_token: SampledToken,
) -> InputBatch:
    """Lays out a step's requests.

    Args:
        scheduled: at least one request, each with at least one token.
        block_size: tokens per KV block.
        vocab_size: bound of the token ids.
        dtype: of the model.
        device: of the model.
        sampled_token: finds the token that a placeholder stands for.
    """
    requests = sorted(scheduled, key=_decodes_by_length)
    query_lens = np.fromiter((len(r.token_ids) for r in requests), np.int64, len(requests))
    context_lens = np.fromiter((r.num_computed_tokens for r in requests), np.int64, len(requests))
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    num_tokens = int(starts[-1])
    token_ids = np.fromiter(chain.from_iterable(r.token_ids for r in requests), np.int64, num_tokens)
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    invalid: dict[str, None] = {}
    filled_rows: list[int] = []
    sources: list[SampledRow] = []
    if outside.any():
        rows = np.flatnonzero(outside)
        owners = np.searchsorted(starts, rows, side="right") - 1
        for row, owner, index in zip(rows.tolist(), owners.tolist(), (rows - starts[owners]).tolist(), strict=True):
            source = sampled_token(requests[owner], index) if token_ids[row] == PLACEHOLDER_TOKEN_ID else None
            if source is None:
                invalid[requests[owner].request_id] = None
            else:
                filled_rows.append(row)
                sources.append(source)
        token_ids[outside] = 0
    device_token_ids = to_device(torch.from_numpy(token_ids), device)
    fill_(device_token_ids, filled_rows, sources)
    positions = np.arange(num_tokens) - np.repeat(starts[:-1] - context_lens, query_lens)
    attention = plan_attention(
        query_lens, context_lens + query_lens, _block_tables(requests), block_size, dtype=dtype, device=device
    )
    return InputBatch(
        requests,
        device_token_ids,
        to_device(torch.from_numpy(positions), device),
        starts,
        attention,
        list(invalid),
    )


def _decodes_by_length(request: ScheduledRequest) -> int:
    decodes = len(request.token_ids) == 1 and request.num_computed_tokens > 0
    return request.num_computed_tokens if decodes else 1 << 62


def _block_tables(requests: list[ScheduledRequest]) -> IntArray:
    """[requests, longest table], padded with 0."""
    sizes = np.fromiter((len(r.block_ids) for r in requests), np.int64, len(requests))
    tables = np.zeros((len(requests), int(sizes.max())), dtype=np.int64)
    filled = np.arange(tables.shape[1]) < sizes[:, None]
    tables[filled] = np.fromiter(chain.from_iterable(r.block_ids for r in requests), np.int64, int(sizes.sum()))
    return tables
