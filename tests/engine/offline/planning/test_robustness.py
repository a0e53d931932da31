"""Pools of unusual shapes: what every order makes of them, exactly."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.offline.planning.blend import PoolWork, rank
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.partition import partition
from neaptide.engine.offline.planning.plan import ORDERS, PromptPool, plan_pool
from neaptide.engine.offline.prefix_tree import PrefixTree
from tests.engine.offline.planning.files import pool, random_tokens
from tests.engine.offline.planning.pools import MODEL, made

KEEPING = ("fcfs", "dfs", "neaptide", "batchllm")
"""Orders that leave rows where they stand if all are alike."""
UNIT = 16
DEEP = 10_000
COPIES = 50_000


def are_the_ends_taken(rows: list[int]) -> bool:
    """Whether 0, 1, 2, ... were taken by two scanners: each row is the first or the last that was left."""
    left, right = 0, len(rows) - 1
    for row in rows:
        if row not in (left, right):
            return False
        left, right = left + (row == left), right - (row != left)
    return True


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_an_empty_pool_has_an_empty_plan(tmp_path: Path, order: str, num_replicas: int) -> None:
    orders = plan_pool(made(tmp_path, [], []), order, num_replicas)
    assert [rows.tolist() for rows in orders] == [[]] * num_replicas


@pytest.mark.parametrize("order", ORDERS)
def test_a_single_request_is_the_plan(tmp_path: Path, order: str) -> None:
    single = made(tmp_path, [[7] * 40], [5])
    assert [rows.tolist() for rows in plan_pool(single, order)] == [[0]]
    assert [rows.tolist() for rows in plan_pool(single, order, 2)] == [[0], []]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> PromptPool:
    prompt = np.full(4 * UNIT, 5, np.int32)
    prompts = pool(tmp_path_factory.mktemp("copies"), [[prompt] * COPIES])
    return PromptPool.of(prompts, np.full(COPIES, 10.0), MODEL, 100_000, UNIT)


def test_50_000_duplicates_are_one_prefix_computed_once(copies: PromptPool) -> None:
    assert copies.tree.depth_tokens.tolist() == [4 * UNIT]
    assert copies.tree.num_wanted.tolist() == [COPIES]
    assert copies.shared_tokens.sum() == (COPIES - 1) * 4 * UNIT
    assert copies.tree.num_levels == 1


@pytest.mark.parametrize("order", ORDERS)
def test_50_000_duplicates_run_one_after_the_other(copies: PromptPool, order: str) -> None:
    (rows,) = plan_pool(copies, order)
    assert copies.num_runs(rows) == 1
    if order in KEEPING:
        assert np.array_equal(rows, np.arange(COPIES))
    elif order == "blendserve":
        assert are_the_ends_taken(rows.tolist())
    else:
        assert np.array_equal(np.sort(rows), np.arange(COPIES))


def test_50_000_duplicates_are_parted_evenly(copies: PromptPool) -> None:
    parts = partition(rank(copies.tree, copies.work), 4)
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == COPIES
    assert np.abs(sizes / (COPIES / 4) - 1).max() <= 0.01


@pytest.fixture(scope="module")
def chain() -> PromptPool:
    """Each prompt is the one before it and 16 tokens more; sorted already, for their tokens would be 3 GB."""
    lengths = UNIT * np.arange(1, DEEP + 1)
    shared = lengths - UNIT
    tree = PrefixTree.of_order(PromptOrder(np.arange(DEEP), shared), UNIT)
    return PromptPool(tree, shared, PoolWork.of(MODEL, lengths, np.full(DEEP, 10.0)), 100_000)


def test_a_chain_of_10_000_prefixes_has_as_many_levels(chain: PromptPool) -> None:
    assert chain.tree.num_levels == DEEP - 1


@pytest.mark.parametrize("order", ORDERS)
def test_a_chain_of_10_000_prefixes_runs_once_in_every_order(chain: PromptPool, order: str) -> None:
    (rows,) = plan_pool(chain, order)
    assert np.array_equal(np.sort(rows), np.arange(DEEP))
    if order in ("fcfs", "dfs", "neaptide"):
        assert np.array_equal(rows, np.arange(DEEP))


@pytest.mark.full
def test_10_000_prompts_each_a_prefix_of_the_next(tmp_path: Path) -> None:
    """From their tokens, 200 MB of them."""
    rng = np.random.default_rng(0)
    text, ends = random_tokens(rng, DEEP), rng.permutation(DEEP)
    prompts = pool(tmp_path, [[text[: end + 1] for end in ends.tolist()]])
    order = PromptOrder.of(prompts)
    assert np.array_equal(prompts.lengths[order.rows], np.arange(1, DEEP + 1))
    assert np.array_equal(order.shared_tokens, np.arange(DEEP))


@pytest.mark.parametrize("order", ORDERS)
def test_one_giant_prompt_among_small_ones(tmp_path: Path, order: str) -> None:
    """Larger than the memory: it runs alone when its turn comes."""
    giant = random_tokens(np.random.default_rng(0), 1_000_000)
    prompts = pool(tmp_path, [[[1, 2, 3], giant, [1, 2, 4]]])
    found = PromptPool.of(prompts, np.full(3, 10.0), MODEL, 100_000, 1)
    assert found.shared_tokens.sum() == 2
    for num_replicas in (1, 2):
        orders = plan_pool(found, order, num_replicas)
        assert sorted(np.concatenate(orders).tolist()) == [0, 1, 2]


def test_two_giant_prompts_share_to_the_token(tmp_path: Path) -> None:
    giant = random_tokens(np.random.default_rng(0), 500_000)
    prompts = pool(tmp_path, [[giant, giant[:499_990], [*giant[:400_000].tolist(), 7]]])
    order = PromptOrder.of(prompts)
    assert sorted(order.shared_tokens.tolist()) == [0, 400_000, 499_990]
