"""Token counts with stated moments, at the small end."""

import numpy as np
import pytest

from neaptide.loadgen.workloads.lengths import lognormal_lengths


@pytest.mark.parametrize(("count", "lengths"), [(0, []), (1, [100])])
def test_too_few_lengths_for_a_spread_are_none_or_the_mean(count: int, lengths: list[int]) -> None:
    drawn = lognormal_lengths(np.random.default_rng(0), count, mean=100.0, std=50.0)
    assert drawn.dtype == np.int64
    assert drawn.tolist() == lengths
