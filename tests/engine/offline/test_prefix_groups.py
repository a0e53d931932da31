"""What prefix sharing saves: BatchLLM's greedy choice, the exact one, and sharing at every level."""

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.offline.prefix_groups import (
    PrefixNode,
    best_single_level_saving,
    enlarge_first_level,
    first_level_saving,
    greedy_saving,
    multi_level_saving,
    saving_ratio,
)

LEAF = PrefixNode(1)


def forest(*children: PrefixNode) -> PrefixNode:
    return PrefixNode(0, children)


NODES = st.recursive(
    st.integers(1, 12).map(PrefixNode),
    lambda below: st.builds(PrefixNode, st.integers(1, 12), st.lists(below, min_size=2, max_size=3).map(tuple)),
    max_leaves=14,
)
TREES = st.lists(NODES, min_size=1, max_size=3).map(lambda children: forest(*children))


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
    tree = forest(PrefixNode(prefix, (PrefixNode(own),) * degree))
    saved = saving_ratio(prefix, own, degree) * degree * (prefix + own)
    assert first_level_saving(tree) == multi_level_saving(tree) == pytest.approx(saved)


def test_a_child_of_10_over_two_grandchildren_of_9() -> None:
    grandchild = PrefixNode(9, (LEAF, LEAF))
    tree = forest(PrefixNode(10, (grandchild, grandchild)))
    assert greedy_saving(tree) == 30
    assert best_single_level_saving(tree) == 38
    assert multi_level_saving(tree) == 48


def test_numbers_of_batchllms_figure_4() -> None:
    # One token 'b' before five prompts; two of them share seven more. The text names these two savings; the rest of
    # the figure's tree is not in it.
    pair = PrefixNode(7, (LEAF, LEAF))
    tree = forest(LEAF, PrefixNode(1, (LEAF, LEAF, pair, LEAF)))
    assert first_level_saving(tree) == 4
    assert first_level_saving(forest(PrefixNode(8, (LEAF, LEAF)))) == 8
    # The pair is forked off: 8 for it, and 'b' still saves 2 among the other three.
    assert enlarge_first_level(tree) == forest(LEAF, PrefixNode(8, (LEAF, LEAF)), PrefixNode(1, (LEAF, LEAF, LEAF)))
    assert greedy_saving(tree) == best_single_level_saving(tree) == 10


def test_a_fork_must_gain_more_than_it_costs() -> None:
    tree = forest(PrefixNode(9, (PrefixNode(9, (LEAF, LEAF)), LEAF)))
    assert enlarge_first_level(tree) == tree


def test_a_child_whose_grandchildren_are_all_forked_off_is_gone() -> None:
    pair = PrefixNode(5, (LEAF, LEAF))
    expected = PrefixNode(7, (LEAF, LEAF))
    assert enlarge_first_level(forest(PrefixNode(2, (pair, pair)))) == forest(expected, expected)


def inner_nodes(node: PrefixNode, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if node.children and path:
        yield path
    for index, child in enumerate(node.children):
        yield from inner_nodes(child, (*path, index))


def saving_of(root: PrefixNode, opened: frozenset[tuple[int, ...]]) -> int:
    """Leaf by leaf, from the definition."""

    def walk(node: PrefixNode, path: tuple[int, ...], depth: int, best: int) -> int:
        depth += node.tokens
        cost = depth if path in opened else 0
        best = depth if path in opened else best
        if not node.children:
            return best
        return sum(walk(child, (*path, i), depth, best) for i, child in enumerate(node.children)) - cost

    return walk(root, (), 0, 0)


def brute_force(root: PrefixNode) -> int:
    nodes = list(inner_nodes(root))
    choices = (frozenset(chosen) for size in range(len(nodes) + 1) for chosen in combinations(nodes, size))
    return max(saving_of(root, chosen) for chosen in choices)


@given(TREES.filter(lambda tree: len(list(inner_nodes(tree))) <= 9))
@settings(max_examples=60)
def test_the_exact_choice_is_the_best_of_all_choices(tree: PrefixNode) -> None:
    assert best_single_level_saving(tree) == brute_force(tree)


@given(TREES)
def test_greedy_is_at_most_exact_is_at_most_multi_level(tree: PrefixNode) -> None:
    first, greedy, exact, multi = (
        saving(tree) for saving in (first_level_saving, greedy_saving, best_single_level_saving, multi_level_saving)
    )
    assert first <= greedy <= exact <= multi


@given(TREES)
def test_enlarging_keeps_every_prompt(tree: PrefixNode) -> None:
    def prompts(node: PrefixNode, before: int = 0) -> list[int]:
        tokens = before + node.tokens
        return [tokens] if not node.children else [n for child in node.children for n in prompts(child, tokens)]

    assert sorted(prompts(enlarge_first_level(tree))) == sorted(prompts(tree))
