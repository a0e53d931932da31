"""What prefix sharing saves: BatchLLM's greedy choice, the exact one, and sharing at every level."""

from collections.abc import Iterator
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.offline.prefix_tree import NO_NODE, PrefixTree
from neaptide_lab.experiments.golden import Branch, prefixes_of
from neaptide_lab.policies.prefix_groups import (
    Grouping,
    Prefixes,
    best_single_level,
    enlarged_first_level,
    multi_level_saving,
    saving_ratio,
)

LEAF = Branch(1)


def forest(*branches: Branch) -> Branch:
    return Branch(0, branches)


def greedy_saving(tree: Branch) -> int:
    return enlarged_first_level(prefixes_of(tree)).saving


def exact_saving(tree: Branch) -> int:
    return best_single_level(prefixes_of(tree)).saving


def groups(grouping: Grouping) -> list[tuple[int, int]]:
    """Depth and members of each."""
    depths, members = grouping.prefixes.depth_tokens.tolist(), grouping.num_members.tolist()
    return sorted((depth, count) for depth, count in zip(depths, members, strict=True) if count)


NODES = st.recursive(
    st.integers(1, 12).map(Branch),
    lambda below: st.builds(Branch, st.integers(1, 12), st.lists(below, min_size=2, max_size=3).map(tuple)),
    max_leaves=14,
)
TREES = st.lists(NODES, min_size=1, max_size=3).map(lambda branches: forest(*branches))


@pytest.mark.parametrize(
    ("prefix", "own", "degree", "exact", "in_blocks"),
    [
        (2000, 200, 2, "45.45", "45.45"),
        (2000, 200, 4, "68.18", "68.18"),
        (2000, 200, 16, "85.23", "85.23"),
        (2000, 1000, 4, "50.00", "50.00"),
        (2000, 1000, 16, "62.50", "62.50"),
        (1000, 1000, 4, "37.50", "37.20"),
        (1000, 1000, 16, "46.88", "46.50"),
        (16000, 200, 16, "92.59", "92.59"),
        (1570, 30, 3, "65.42", "65.33"),
    ],
)
def test_saving_ratio(prefix: int, own: int, degree: int, exact: str, in_blocks: str) -> None:
    assert f"{100 * saving_ratio(prefix, own, degree):.2f}" == exact
    assert f"{100 * saving_ratio(prefix, own, degree, block_size=16):.2f}" == in_blocks


@pytest.mark.parametrize(("prefix", "shared"), [(15, 0), (16, 16), (1000, 992), (1570, 1568), (2000, 2000)])
def test_only_whole_blocks_are_shared(prefix: int, shared: int) -> None:
    assert saving_ratio(prefix, 30, 2, block_size=16) == shared / (2 * (prefix + 30))


@given(st.integers(1, 500), st.integers(0, 100), st.integers(1, 20))
def test_saving_ratio_is_that_of_the_tree(prefix: int, own: int, degree: int) -> None:
    tree = prefixes_of(forest(Branch(prefix, (Branch(own),) * degree)))
    saved = saving_ratio(prefix, own, degree) * degree * (prefix + own)
    assert enlarged_first_level(tree).saving == multi_level_saving(tree) == pytest.approx(saved)


def test_a_child_of_10_over_two_grandchildren_of_9() -> None:
    grandchild = Branch(9, (LEAF, LEAF))
    tree = forest(Branch(10, (grandchild, grandchild)))
    assert (greedy_saving(tree), exact_saving(tree), multi_level_saving(prefixes_of(tree))) == (30, 38, 48)


def test_numbers_of_batchllms_figure_4() -> None:
    # One token 'b' before five prompts; two of them share seven more. The text names these savings; the rest of the
    # figure's tree is not in it.
    pair = Branch(7, (LEAF, LEAF))
    tree = prefixes_of(forest(LEAF, Branch(1, (LEAF, LEAF, pair, LEAF))))
    assert enlarged_first_level(prefixes_of(forest(Branch(8, (LEAF, LEAF))))).saving == 8
    # The pair is forked off: 8 for it, and 'b' still saves 2 among the other three.
    assert groups(enlarged_first_level(tree)) == [(1, 3), (8, 2)]
    assert enlarged_first_level(tree).saving == best_single_level(tree).saving == 10


def test_a_fork_must_gain_more_than_it_costs() -> None:
    tree = prefixes_of(forest(Branch(9, (Branch(9, (LEAF, LEAF)), LEAF))))
    assert groups(enlarged_first_level(tree)) == [(9, 3)]


def test_a_child_whose_grandchildren_are_all_forked_off_is_gone() -> None:
    pair = Branch(5, (LEAF, LEAF))
    assert groups(enlarged_first_level(prefixes_of(forest(Branch(2, (pair, pair)))))) == [(7, 2), (7, 2)]


def test_what_is_merged_goes_on_with_the_child_although_a_group_between_is_forked_off() -> None:
    # Of the middle (3 tokens, 4 prompts of its own) the pair below is no fork (1 < 3): its prompts are the middle's.
    # The middle, with six prompts, gains 15 > 10.
    middle = Branch(3, (LEAF, LEAF, LEAF, LEAF, Branch(1, (LEAF, LEAF))))
    assert groups(enlarged_first_level(prefixes_of(forest(Branch(10, (middle, LEAF)))))) == [(10, 1), (13, 6)]


def inner_nodes(node: Branch, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if node.branches and path:
        yield path
    for index, branch in enumerate(node.branches):
        yield from inner_nodes(branch, (*path, index))


def saving_of(root: Branch, opened: frozenset[tuple[int, ...]]) -> int:
    """Leaf by leaf, from the definition."""

    def walk(node: Branch, path: tuple[int, ...], depth: int, best: int) -> int:
        depth += node.tokens
        cost = depth if path in opened else 0
        best = depth if path in opened else best
        if not node.branches:
            return best
        return sum(walk(branch, (*path, i), depth, best) for i, branch in enumerate(node.branches)) - cost

    return walk(root, (), 0, 0)


def brute_force(root: Branch) -> int:
    nodes = list(inner_nodes(root))
    choices = (frozenset(chosen) for size in range(len(nodes) + 1) for chosen in combinations(nodes, size))
    return max(saving_of(root, chosen) for chosen in choices)


@given(TREES.filter(lambda tree: len(list(inner_nodes(tree))) <= 9))
@settings(max_examples=60)
def test_the_exact_choice_is_the_best_of_all_choices(tree: Branch) -> None:
    assert exact_saving(tree) == brute_force(tree)


@given(TREES)
@settings(max_examples=200)
def test_greedy_is_at_most_exact_is_at_most_multi_level(tree: Branch) -> None:
    prefixes = prefixes_of(tree)
    savings = [grouping(prefixes).saving for grouping in (enlarged_first_level, best_single_level)]
    assert [*savings, multi_level_saving(prefixes)] == sorted([*savings, multi_level_saving(prefixes)])


def random_tree(rng: Random, levels: int) -> Branch:
    """Wider and deeper than those above, and with tokens in which greedy choices go wrong."""
    below = rng.choice((0, 2, 2, 3, 5)) if levels else 0
    return Branch(rng.randint(1, 40), tuple(random_tree(rng, levels - 1) for _ in range(below)))


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.full)])
def test_the_exact_choice_is_never_worse_than_algorithm_1(count: int) -> None:
    rng = Random(0)
    num_better = num_checked = 0
    for _ in range(count):
        tree = forest(*(random_tree(rng, 5) for _ in range(rng.randint(1, 3))))
        greedy, exact = greedy_saving(tree), exact_saving(tree)
        assert greedy <= exact
        num_better += greedy < exact
        if len(list(inner_nodes(tree))) <= 5:
            assert exact == brute_force(tree)
            num_checked += 1
    assert num_better > count // 2
    assert num_checked > count // 20


@given(TREES)
def test_a_group_shares_a_prefix_that_all_its_prompts_begin_with(tree: Branch) -> None:
    prefixes = prefixes_of(tree)
    for grouping in (enlarged_first_level(prefixes), best_single_level(prefixes)):
        for prefix, owner in enumerate(grouping.owner.tolist()):
            above = {NO_NODE, prefix}
            while (prefix := int(prefixes.parent[prefix])) != NO_NODE:
                above.add(prefix)
            assert owner in above


def test_10_000_levels_are_grouped_without_recursion() -> None:
    # Two prompts end at every level; with one more at the last, the greedy one forks just that off.
    levels = 10_000
    chain = Prefixes(
        np.arange(levels) - 1, 1 + np.arange(levels), np.full(levels, 2) + (np.arange(levels) == levels - 1)
    )
    assert multi_level_saving(chain) == sum(2 * (levels - level) for level in range(levels))
    greedy, exact = enlarged_first_level(chain), best_single_level(chain)
    assert (greedy.saving < exact.saving < multi_level_saving(chain), len(exact.owner)) == (True, levels)


def test_without_shared_prefixes_nothing_is_grouped() -> None:
    prefixes = Prefixes.of(PrefixTree.without_sharing(3))
    for grouping in (enlarged_first_level(prefixes), best_single_level(prefixes)):
        assert (grouping.saving, len(grouping.num_members)) == (0, 0)
    assert multi_level_saving(prefixes) == 0


def test_the_prefixes_of_a_tree_stand_in_preorder() -> None:
    # Nodes as a tree may number them: the deeper one first.
    tree = PrefixTree(
        np.arange(4),
        np.array([0, 0, 1, 1]),
        np.array([1, NO_NODE]),
        np.array([32, 16]),
        np.array([0, 0]),
        np.array([2, 4]),
    )
    prefixes = Prefixes.of(tree)
    found = (prefixes.parent, prefixes.depth_tokens, prefixes.num_prompts, prefixes.nodes, prefixes.num_below)
    assert [column.tolist() for column in found] == [[NO_NODE, 0], [16, 32], [2, 2], [1, 0], [4, 2]]
