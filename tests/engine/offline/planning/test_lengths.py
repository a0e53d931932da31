"""Answers' lengths from a sample (BlendServe, section 5.1)."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.offline.planning.lengths import BEGUN_TOKENS, PRIOR_OUTPUT_TOKENS, estimated_outputs, sampled_rows
from neaptide.engine.offline.prefix_tree import PrefixTree
from tests.engine.offline.planning.pools import grouped, made

UNKNOWN = np.nan


def estimates(
    tmp_path: Path, known: list[float], limit: int = 10_000, so_far: list[float] | None = None
) -> list[float]:
    # Rows 0-3 share 32 tokens, 0 and 1 16 more; 4 and 5 share 16; 6 stands alone.
    prompts = [[1] * 32 + [2] * 16 + [row] for row in (0, 1)] + [[1] * 32 + [row] for row in (5, 6)]
    prompts += [[3] * 16 + [row] for row in (0, 1)] + [[4]]
    tree = made(tmp_path, prompts, [1] * 7).tree
    running = None if so_far is None else np.array(so_far, np.float64)
    return estimated_outputs(tree, np.array(known), np.full(7, limit), running).tolist()


def test_the_deepest_prefix_with_a_sample_tells(tmp_path: Path) -> None:
    found = estimates(tmp_path, [10, UNKNOWN, 30, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN])
    assert found == [10, 10, 30, 20, 20, 20, 20]


def test_a_subtree_without_samples_goes_by_its_siblings(tmp_path: Path) -> None:
    found = estimates(tmp_path, [UNKNOWN, UNKNOWN, 30, UNKNOWN, 50, UNKNOWN, UNKNOWN])
    assert found == [30, 30, 30, 30, 50, 50, 40]


def test_without_samples_it_is_the_prior_and_never_above_the_limit(tmp_path: Path) -> None:
    assert estimates(tmp_path, [UNKNOWN] * 7) == [PRIOR_OUTPUT_TOKENS] * 7
    assert estimates(tmp_path, [UNKNOWN] * 7, limit=5) == [5] * 7


def test_answers_that_run_make_those_that_are_expected_longer(tmp_path: Path) -> None:
    # Rows 0-3: one has ended after 3 tokens, two run that have 2 and 6: 3 * sqrt(1 + (4 + 36) / 9) = 7.
    found = estimates(tmp_path, [3, UNKNOWN, UNKNOWN, UNKNOWN, 9, UNKNOWN, UNKNOWN], so_far=[0, 0, 2, 6, 0, 0, 0])
    assert found[:4] == [3, 3, pytest.approx(9), pytest.approx(13)]  # the mean of rows 0 and 1 is that of row 0
    assert found[4:6] == [9, 9]
    assert found[6] == pytest.approx(6 * np.sqrt(1 + 40 / 90))


def test_a_kind_that_has_begun_and_of_which_none_has_ended_is_long(tmp_path: Path) -> None:
    known, so_far = [UNKNOWN] * 4 + [7, UNKNOWN, UNKNOWN], [0, 0, 2, 0, 0, 0, 0]
    found = estimates(tmp_path, known, so_far=so_far)
    assert found[:6] == [BEGUN_TOKENS, BEGUN_TOKENS, BEGUN_TOKENS + 2, BEGUN_TOKENS, 7, 7]
    assert found[6] == pytest.approx(7 * np.sqrt(1 + 4 / 49))
    # All that has been put out without an end, if that is more; and never above the limit.
    assert estimates(tmp_path, known, so_far=[1500, 0, 2000, 0, 0, 0, 0])[:4] == [5000, 3500, 5500, 3500]
    assert estimates(tmp_path, known, limit=500, so_far=so_far)[:4] == [500] * 4


def test_below_a_prefix_with_ends_what_runs_is_the_least(tmp_path: Path) -> None:
    # Below the deeper prefix row 0 has 40 tokens and no end; its siblings have ended after 10.
    found = estimates(tmp_path, [UNKNOWN, UNKNOWN, 10, 10, UNKNOWN, UNKNOWN, UNKNOWN], so_far=[40, 0, 0, 0, 0, 0, 0])
    assert found[:4] == [80, 40, 10, 10]
    found = estimates(tmp_path, [UNKNOWN, UNKNOWN, 10, 10, UNKNOWN, UNKNOWN, UNKNOWN], so_far=[4, 0, 0, 0, 0, 0, 0])
    of_siblings = 10 * np.sqrt(1 + 16 / 200)
    assert found[:4] == [pytest.approx(4 + of_siblings), pytest.approx(of_siblings), 10, 10]


def alone(count: int) -> PrefixTree:
    return PrefixTree.without_sharing(count)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (3, 3), (100, 8), (2000, 20)])
def test_so_many_are_sampled(count: int, expected: int) -> None:
    rows = sampled_rows(alone(count), np.zeros(count, np.int64))
    assert len(set(rows.tolist())) == len(rows) == expected


def test_every_job_is_sampled_over_all_of_its_tree() -> None:
    job = np.repeat([0, 1], [1000, 2000])
    rows = sampled_rows(alone(3000), job)
    assert np.bincount(job[rows]).tolist() == [10, 20]
    assert np.bincount(rows[rows < 1000] // 100).tolist() == [1] * 10


def test_a_sample_sees_the_large_groups(tmp_path: Path) -> None:
    tree = made(tmp_path, grouped((300, 16, 1), (500, 32, 1)), [1] * 800).tree
    rows = sampled_rows(tree, np.zeros(800, np.int64))
    assert np.bincount((rows >= 300).astype(int)).tolist() == [3, 5]


def test_a_small_group_that_it_misses_gets_one_the_largest_first(tmp_path: Path) -> None:
    tree = made(tmp_path, grouped((800, 16, 1), (3, 16, 1), (5, 16, 1), *[(2, 16, 1)] * 20), [1] * 848).tree
    rows = sampled_rows(tree, np.zeros(848, np.int64))
    assert len(set(rows.tolist())) == len(rows) <= 18
    assert any(800 <= row < 803 for row in rows)
    assert any(803 <= row < 808 for row in rows)
