"""Sampling over vocabularies that are too large to sort in each step gives what sorting gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from neaptide.executors.torch.sampling import sampler

VOCAB = 4 * sampler._HEAD


def sorted_cut(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Row by row, in words that are slow."""
    kept = torch.zeros_like(probabilities)
    for row, values in enumerate(probabilities.tolist()):
        order = sorted(range(len(values)), key=lambda token: (-values[token], token))[:top_k]
        share, left = 0.0, top_p * sum(values[token] for token in order)
        for place, token in enumerate(order):
            if place and share >= left:
                break
            kept[row, token] = values[token]
            share += values[token]
    return kept


def made(kind: str) -> Tensor:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7))
    scale: dict[str, Any] = {"peaked": 8.0, "flat": 0.01, "usual": 3.0}
    if kind == "equals":
        return torch.softmax(logits.round(), dim=-1)
    if kind == "certain":
        return torch.softmax(logits * 1e4, dim=-1)
    return torch.softmax(logits * scale[kind], dim=-1)


@pytest.mark.parametrize("kind", ["peaked", "usual", "flat", "equals", "certain"])
@pytest.mark.parametrize(("top_k", "top_p"), [(VOCAB, 0.9), (50, 1.0), (50, 0.5), (3000, 0.9), (1024, 0.99), (1, 1e-9)])
def test_the_first_tokens_alone_decide_as_all_of_them_do(kind: str, top_k: int, top_p: float) -> None:
    probabilities = made(kind)
    columns = torch.full((3, 1), float(top_k)), torch.full((3, 1), top_p)
    cut = sampler._cut_tail(probabilities, *columns)
    whole = sampler._cut_sorted(probabilities, *columns)
    assert torch.equal(cut, whole)
    expected = sorted_cut(probabilities, top_k, top_p)
    assert (cut != expected).sum() <= 3  # a sum of rounded numbers may end one token sooner or later
    assert torch.equal(cut[cut > 0], probabilities[cut > 0])
