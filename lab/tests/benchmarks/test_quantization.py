import math

import pytest
import torch

from lab.benchmarks.quantization import Difference


def test_what_is_different_is_told_from_the_exact_way() -> None:
    """Right tokens with probabilities of 1/2 and 1/4; the other way once finds another one the likeliest, where the
    exact way is sure. Each prediction is added on its own."""
    exact = torch.tensor([[2.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    halves = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.5, 0.0]]).log().clamp_min(-100.0)
    other, same = Difference(), Difference()
    for row, target in enumerate([0, 1]):
        other.add(halves[row : row + 1], exact[row : row + 1], torch.tensor([target]))
        same.add(exact[row : row + 1], exact[row : row + 1], torch.tensor([target]))
    found = other.figures()
    assert found["perplexity"] == pytest.approx(math.sqrt(2 * 4))
    assert (found["same_token"], found["same_token_where_sure"]) == (0.5, 0.0)
    figures = same.figures()
    assert (figures["same_token"], figures["same_token_where_sure"], figures["rms"]) == (1.0, 1.0, 0.0)


def test_the_error_is_the_root_of_the_mean_square() -> None:
    difference = Difference()
    difference.add(torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0]))
    expected = math.sqrt((math.log(1.5) ** 2 + math.log(2.0) ** 2) / 2)
    assert difference.figures()["rms"] == pytest.approx(expected)


def test_an_exact_way_that_is_never_sure_has_no_share_of_that() -> None:
    difference = Difference()
    difference.add(torch.zeros(3, 4), torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    assert difference.figures()["same_token_where_sure"] is None
