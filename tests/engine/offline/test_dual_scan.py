"""BlendServe's split of memory between the two ends (ASPLOS'26, section 5.3, Algorithm 3)."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from neaptide.engine.offline.dual_scan import Split, dual_scan_order, split_memory

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


def scanned(compute_s: list[float], memory_s: list[float], held: list[int], lasting: list[int], kv: int) -> list[int]:
    columns = (np.array(column, float) for column in (compute_s, memory_s, held, lasting))
    return dual_scan_order(*columns, kv).tolist()


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 100), st.integers(1, 50))), st.data())
def test_the_scanners_take_every_row_once_each_from_its_end(
    rows: list[tuple[float, float, int, int]], data: st.DataObject
) -> None:
    rows.sort(key=lambda row: -row[0] / row[1])
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    order = scanned(*columns, data.draw(st.integers(1, 500)))  # type: ignore[arg-type]
    assert sorted(order) == list(range(len(rows)))
    left = right = 0
    for row in order:
        assert row in (left, len(rows) - 1 - right)
        left, right = left + (row == left), right + (row != left)


def test_each_end_fills_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.engine.offline.dual_scan.WINDOW_ROWS", 1)
    # Densities 3 and 0.5 with root 1.5 part a memory of 100 into 40 and 60. Left ones hold 20 for a step, so two run at
    # once; right ones hold 60 for ten steps, so one does, and 2 * 11 left ones pass until the next one starts.
    compute_s, memory_s = [3.0] * 24 + [3.0] * 6, [1.0] * 24 + [6.0] * 6
    assert split_memory(100, 3.0, 0.5, 90 / 60) == (pytest.approx(40.0), pytest.approx(60.0))
    order = scanned(compute_s, memory_s, [20] * 24 + [60] * 6, [1] * 24 + [10] * 6, 100)
    assert order == [29, *range(22), 28, 22, 23, 27, 26, 25, 24]


def test_what_rounding_leaves_of_tokens_that_are_no_whole_numbers_keeps_no_row_out() -> None:
    """Expected answers are means. When all have ended each end seems to hold some 1e-15 tokens."""
    prompts, lasting = np.array([20, 20, 700, 1, 20]), np.array([6.3, 7.1, 6.3, 33.4, 100 / 3])
    compute_s, memory_s = prompts + lasting, prompts * lasting + lasting**2 / 2
    order = dual_scan_order(compute_s, memory_s, prompts + lasting / 2, lasting, 1000.0)
    assert sorted(order.tolist()) == list(range(5))


def test_requests_larger_than_the_memory_run_one_by_one() -> None:
    assert scanned([2.0, 1.0], [1.0, 1.0], [900, 900], [5, 5], 100) == [1, 0]
