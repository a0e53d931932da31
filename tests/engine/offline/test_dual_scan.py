"""BlendServe's split of memory between the two ends (ASPLOS'26, section 5.3, Algorithm 3)."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from neaptide.engine.offline.dual_scan import Side, Split, prefill_budgets, split_memory

DENSITIES = st.floats(1e-3, 1e3)


def test_the_papers_example() -> None:
    left, right = split_memory(60.0, 3.73, 0.096, 1.27)
    assert (f"{left:.2f}", f"{right:.2f}") == ("19.38", "40.62")  # the paper prints 19.3 and 40.7


@given(st.floats(1.0, 1e12), DENSITIES, DENSITIES, st.floats(0.0, 1.0))
def test_both_equations_hold(memory: float, first: float, second: float, weight: float) -> None:
    left_density, right_density = max(first, second), min(first, second)
    assume(left_density > 1.001 * right_density)
    root = weight * left_density + (1 - weight) * right_density
    left, right = split_memory(memory, left_density, right_density, root)
    assert left >= 0
    assert right >= 0
    assert left + right == pytest.approx(memory)
    assert left * left_density + right * right_density == pytest.approx(memory * root)


@pytest.mark.parametrize(("root", "expected"), [(5.0, Split(60.0, 0.0)), (0.05, Split(0.0, 60.0))])
def test_a_root_outside_gives_all_to_the_nearer_end(root: float, expected: Split) -> None:
    assert split_memory(60.0, 3.73, 0.096, root) == expected


def test_equal_densities_are_split_in_half() -> None:
    assert split_memory(60.0, 1.5, 1.5, 1.2) == Split(30.0, 30.0)


def test_prefill_budgets_by_hand() -> None:
    # Memory 1,000 splits 250 / 750: the left holds 250 / (8 * 1) requests, the right 750 / (5 * 1).
    budgets = prefill_budgets(1000.0, Side(4.0, 6, 4), Side(0.0, 1, 8), root_density=1.0, kv_bytes_per_token=1.0)
    assert budgets == Split(250 / 8 * 6 / 4, 750 / 5 * 1 / 8)
