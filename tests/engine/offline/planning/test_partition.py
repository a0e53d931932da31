"""Parts of equal work and density for replicas."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.offline.planning.blend import Ranked, rank
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.partition import partition
from neaptide.engine.offline.planning.plan import PromptPool
from neaptide.engine.offline.prefix_tree import PrefixTree
from tests.engine.offline.planning.files import pool
from tests.engine.offline.planning.pools import MODEL, grouped


def mixed(tmp_path: Path) -> tuple[PromptPool, list[list[int]]]:
    """Groups that share much and answer briefly, rows alone, and long answers of many lengths."""
    prompts = grouped((120, 160, 16), (90, 320, 16), (400, 16, 48), *[(1, 0, 64)] * 300, *[(1, 0, 8)] * 200)
    rng = np.random.default_rng(0)
    outputs = [*[2] * 210, *rng.integers(20, 80, 400), *rng.integers(20, 80, 300), *rng.exponential(1500, 200) + 1]
    pool_ = PromptPool.of(pool(tmp_path, [prompts]), np.array(outputs, float), MODEL, 100_000, 16)
    return pool_, prompts


def shared_tokens(tmp_path: Path, prompts: list[list[int]], rows: list[int]) -> int:
    order = PromptOrder.of(pool(tmp_path, [[prompts[row] for row in rows]]))
    tree = PrefixTree.of_order(order)
    lengths = np.array([len(prompts[row]) for row in rows])[tree.rows]
    return int((lengths - tree.new_tokens(lengths)).sum())


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_work_and_density_are_equal_within_two_percent_and_sharing_stays(tmp_path: Path, num_replicas: int) -> None:
    pool_, prompts = mixed(tmp_path)
    ranked = rank(pool_.tree, pool_.work, kept_sharing=1.0)
    parts = partition(ranked, num_replicas)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(prompts)))
    compute_s = np.array([ranked.compute_s[part].sum() for part in parts])
    memory_s = np.array([ranked.memory_s[part].sum() for part in parts])
    for column in (compute_s, memory_s, compute_s / memory_s):
        assert np.abs(column / column.mean() - 1).max() <= 0.02
    kept = sum(shared_tokens(tmp_path, prompts, ranked.rows[part].tolist()) for part in parts)
    assert kept >= 0.99 * pool_.shared_tokens.sum()


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_of_nearly_a_replicas_share_leaves_both_times_even(seed: int) -> None:
    """Its replica gets compute and next to no memory time from the others, who must not drift apart for it."""
    rng = np.random.default_rng(seed)
    sizes = [1, *[25] * 40, *[1] * 300]
    piece = np.repeat(np.arange(len(sizes)), sizes)
    of_group = rng.uniform(1.0, 3.0, 1000) * np.repeat(rng.uniform(0.2, 1.8, 40), 25)
    compute_s = np.concatenate(([1.0], of_group, rng.uniform(0.1, 1.0, 300)))
    memory_s = np.concatenate(([0.0], rng.uniform(0.1, 0.2, 1000), rng.uniform(1.0, 9.0, 300)))
    memory_s[0] = 0.93 * memory_s.sum() / (4.0 - 0.93)
    shared = np.where(np.diff(piece, prepend=-1) != 0, 0, 100)
    parts = partition(Ranked(np.arange(len(piece)), shared, compute_s, memory_s, piece), 4)
    times = np.array([[compute_s[part].sum(), memory_s[part].sum()] for part in parts])
    columns = np.column_stack((times, times[:, 0] / times[:, 1]))
    assert np.abs(columns / columns.mean(axis=0) - 1).max() <= 0.01


def test_a_group_too_large_for_a_replica_is_cut_where_least_is_shared() -> None:
    shared = np.array([0, *[8] * 49, 3, *[8] * 49])
    ranked = Ranked(np.arange(100), shared, np.ones(100), np.ones(100), np.zeros(100, np.int64))
    assert sorted(part.tolist() for part in partition(ranked, 2)) == [list(range(50)), list(range(50, 100))]


@pytest.mark.parametrize("rows", [0, 1])
def test_replicas_without_work(rows: int) -> None:
    ranked = Ranked(*[np.zeros(rows, np.int64)] * 2, *[np.ones(rows)] * 2, np.zeros(rows, np.int64))
    assert [part.tolist() for part in partition(ranked, 3)] == [[0] * rows, [], []]


def test_equal_groups_that_do_not_go_up_in_the_replicas_are_cut_where_that_is_needed() -> None:
    """400 groups for 64 replicas: 6.25 each. 16 of them in four would do, with 48 prefixes more than once."""
    piece = np.repeat(np.arange(400), 16)
    is_first = np.diff(piece, prepend=-1) != 0
    compute_s = np.where(is_first, 2.0, 1.0)
    ranked = Ranked(np.arange(6400), np.where(is_first, 0, 100), compute_s, np.ones(6400), piece)
    parts = partition(ranked, 64)
    assert sorted(np.concatenate(parts).tolist()) == list(range(6400))
    assert [len(part) for part in parts] == [100] * 64
    assert sum(len(set(piece[part].tolist())) for part in parts) == 400 + 77
