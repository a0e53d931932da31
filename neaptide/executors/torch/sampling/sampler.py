"""Picks the next token of each row.

Greedy rows take the largest logit. Other rows are scaled by their temperature and cut by top-k, top-p and min-p, in
that order, as in transformers. They are drawn by inverting the cumulative distribution in order of token id, with one
uniform number per row. That number depends only on the request's seed and the output position (`random_stream`), so the
draw does not depend on the batch. Between devices it differs only where the probabilities do.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from neaptide.executors.torch.request_state import RequestState
from neaptide.executors.torch.sampling.logits_edits import Allowed, edit_logits
from neaptide.executors.torch.sampling.random_stream import uniforms
from neaptide.kernels.transfer import to_device

_MIN_TEMPERATURE = 1e-30
"""Smaller values are 0 in fp32, and 0 / 0 is no probability. This one already makes a second-best logit 0."""
_HEAD = 1024
"""Number of most likely tokens that are sorted first."""


class Sampled(NamedTuple):
    """Sampled tokens, on the logits' device."""

    token_ids: Tensor
    """[rows] int64; undefined for a row that is not finite."""
    finite: Tensor
    """[rows] bool, whether all of the row's logits were finite."""


def sample(
    logits: Tensor, states: list[RequestState], output_positions: list[int], allowed: Allowed | None = None
) -> Sampled:
    """Samples one token per row.

    Args:
        logits: [rows, vocab_size] fp32, raw.
        states: each row's request.
        output_positions: index of the new token in the request's output.
        allowed: grammar masks of some rows.
    """
    # amin and amax propagate NaN. ``aminmax`` along a dimension takes twenty times as long on a CPU.
    finite = torch.isfinite(logits.amin(dim=-1)) & torch.isfinite(logits.amax(dim=-1))
    edited = edit_logits(logits, states, output_positions, allowed)
    drawn_rows = [row for row, state in enumerate(states) if state.params.temperature > 0]
    if not drawn_rows:
        return Sampled(edited.argmax(dim=-1), finite)
    drawn_states = [states[row] for row in drawn_rows]
    draws = uniforms([state.seed for state in drawn_states], [output_positions[row] for row in drawn_rows])
    target = to_device(torch.from_numpy(draws), logits.device)
    if len(drawn_rows) == len(states):
        return Sampled(draw(filtered_probabilities(edited, drawn_states), target), finite)
    token_ids = edited.argmax(dim=-1)
    rows = to_device(torch.tensor(drawn_rows), logits.device)
    token_ids[rows] = draw(filtered_probabilities(edited[rows], drawn_states), target)
    return Sampled(token_ids, finite)


def filtered_probabilities(logits: Tensor, states: list[RequestState]) -> Tensor:
    """Probabilities after temperature, with 0 for tokens that top-k, top-p or min-p remove; not renormalised.

    Top-k keeps exactly k tokens. Top-p keeps the smallest set whose share of the remaining probability reaches p; among
    equals the lower token id stays. Min-p keeps tokens of at least that fraction of the largest.

    Args:
        logits: [rows, vocab_size] fp32.
        states: each row's request, temperature > 0.

    Returns:
        [rows, vocab_size] fp32.
    """
    params = [state.params for state in states]
    vocab_size, device = logits.shape[1], logits.device

    def column(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32).unsqueeze(1), device)  # [rows, 1]

    # Subtract the maximum first: a tiny temperature would otherwise overflow to inf - inf.
    centred = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = torch.softmax(centred / column([max(p.temperature, _MIN_TEMPERATURE) for p in params]), dim=-1)
    sorted_rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
    if sorted_rows:
        top_k = column([params[row].top_k or vocab_size for row in sorted_rows])
        top_p = column([params[row].top_p for row in sorted_rows])
        if len(sorted_rows) == len(params):
            probabilities = _cut_tail(probabilities, top_k, top_p)
        else:
            rows = to_device(torch.tensor(sorted_rows), device)
            probabilities[rows] = _cut_tail(probabilities[rows], top_k, top_p)
    if any(p.min_p > 0 for p in params):
        floor = probabilities.amax(dim=-1, keepdim=True) * column([p.min_p for p in params])
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    return probabilities


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Index of the first cumulative sum above ``uniform`` times the total.

    Args:
        probabilities: [rows, vocab_size] >= 0, any sum.
        uniform: [rows] float64 in [0, 1).

    Returns:
        [rows] int64; never a token of probability 0.
    """
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp_(max=probabilities.shape[1] - 1)  # out of range only for rows of NaN


def _cut_tail(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zeroes all but the top-k, then all but the top-p of those; ``top_k`` and ``top_p`` are [rows, 1]."""
    if probabilities.device.type != "cpu" or probabilities.shape[1] <= 2 * _HEAD:
        return _cut_sorted(probabilities, top_k, top_p)
    # On a CPU, sorting a large vocabulary takes 20 ms per row, and nearly always the first tokens decide.
    head, token_ids = _stable_head(probabilities)
    total = probabilities.sum(dim=-1, keepdim=True, dtype=torch.float64).float()
    cut = _cut(probabilities, head, token_ids, top_k, top_p, total)
    last = head[:, -1:]
    has_tie = (last > 0) & ((probabilities >= last).sum(dim=-1, keepdim=True) > _HEAD)
    holds_all = head.sum(dim=-1, keepdim=True, dtype=torch.float64).float() >= top_p * total
    decides = (top_k <= _HEAD) | (holds_all & (top_k >= probabilities.shape[1]))
    unsure = (has_tie | ~decides).squeeze(1).nonzero().squeeze(1)
    if len(unsure):
        cut[unsure] = _cut_sorted(probabilities[unsure], top_k[unsure], top_p[unsure])
    return cut


def _cut_sorted(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    return _cut(probabilities, ordered, token_ids, top_k, top_p)


def _stable_head(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The first _HEAD values and token ids of a stable sort, [rows, _HEAD], unless there are ties at the end."""
    token_ids = probabilities.topk(_HEAD, dim=-1, sorted=False).indices.sort(dim=-1).values
    head, order = probabilities.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return head, token_ids.gather(-1, order)


def _cut(
    probabilities: Tensor, ordered: Tensor, token_ids: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None = None
) -> Tensor:
    """Zeroes all tokens but the chosen ones of ``ordered``.

    ``total`` is the row's sum; it is given if ``ordered`` is only a part and top-k keeps everything.
    """
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill(ranks >= top_k, 0.0)
    cumulative = ordered.cumsum(dim=-1)
    before = cumulative - ordered
    left = cumulative[:, -1:]
    if total is not None:
        left = torch.where(top_k > ordered.shape[1], total, left)
    beyond = before >= top_p * left
    beyond[:, 0] = False  # a tiny top-p is 0 in fp32
    ordered = ordered.masked_fill(beyond, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, token_ids, ordered)
