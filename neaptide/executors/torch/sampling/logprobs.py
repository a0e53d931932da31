"""Log-probabilities of the raw distribution, before temperature, penalties and cuts."""

from typing import NamedTuple

import torch
from torch import Tensor

from neaptide.engine.messages import TokenLogprobs


class Scored(NamedTuple):
    """Log-probabilities of some rows, on the device."""

    token_ids: Tensor
    """[rows] int64, the scored tokens."""
    logprobs: Tensor
    """[rows] fp32, their log-probabilities."""
    top_ids: Tensor
    """[rows, k] int64, most likely first."""
    top_logprobs: Tensor
    """[rows, k] fp32."""


def score(logits: Tensor, token_ids: Tensor, top: int) -> Scored:
    """Scores ``token_ids`` [rows] under ``logits`` [rows, vocab_size] fp32, with the ``top`` most likely tokens."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return Scored(token_ids, logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1), ids, values)


def to_host(scored: Scored, tops: list[int]) -> list[TokenLogprobs]:
    """One record per row, with ``tops[row]`` of the most likely tokens. Waits for the device."""
    rows = zip(*(part.tolist() for part in scored), tops, strict=True)
    return [TokenLogprobs(token, value, ids[:top], values[:top]) for token, value, ids, values, top in rows]
