import math

import pytest
import torch

from lab.benchmarks.quantization import EXACT, PLAIN, Computed, differences


def test_what_is_different_is_told_from_the_exact_way() -> None:
    """Right tokens with probabilities of 1/2 and 1/4; the other way once finds another one the likeliest, where the
    exact way is sure."""
    exact = Computed(torch.tensor([[2.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]]), torch.tensor([0, 0]))
    same_by_halves = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.5, 0.0]]).log()
    other = Computed(torch.where(torch.isfinite(same_by_halves), same_by_halves, -100.0), torch.tensor([0, 1]))
    found = differences({EXACT: exact, PLAIN: other})
    assert found[PLAIN]["perplexity"] == pytest.approx(math.sqrt(2 * 4))
    assert (found[PLAIN]["same_token"], found[PLAIN]["same_token_where_sure"]) == (0.5, 0.0)
    assert (found[EXACT]["same_token"], found[EXACT]["same_token_where_sure"], found[EXACT]["rms"]) == (1.0, 1.0, 0.0)


def test_an_exact_way_that_is_never_sure_has_no_share_of_that() -> None:
    flat = Computed(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    assert differences({EXACT: flat})[EXACT]["same_token_where_sure"] is None
