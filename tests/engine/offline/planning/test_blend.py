"""BlendServe's tree: densities of nodes, sorted layers, splits (ASPLOS'26, Algorithms 1 and 2)."""

import math
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given

from neaptide.engine.offline.planned import RAW
from neaptide.engine.offline.planning.blend import (
    CRUMB_SHARE,
    REPEATED_SHARE,
    node_densities,
    rank,
    sort_layers,
    split,
)
from neaptide.engine.offline.planning.plan import PromptPool
from neaptide.engine.offline.planning.pooled import DUAL_SCAN, PooledJob, PooledRows
from neaptide.engine.offline.prefix_tree import NO_NODE
from tests.engine.offline.planning.files import Prompt, written
from tests.engine.offline.planning.pools import MODEL, OUTPUTS, PROMPTS, grouped, made


def density_of(pool: PromptPool, prompts: list[Prompt], rows: list[int]) -> float:
    """From the definition: every unit of 16 tokens that rows share is computed once."""
    outputs = [float(pool.work.output_tokens[row]) for row in rows]
    units = {tuple(prompts[row][: end + 16]) for row in rows for end in range(0, len(prompts[row]) - 15, 16)}
    in_nodes = {
        unit for unit in units if sum(prompts[row][: len(unit)] == list(unit) for row in range(len(prompts))) > 1
    }
    shared = sum(sum(prompts[row][: len(unit)] == list(unit) for row in rows) - 1 for unit in in_nodes) * 16
    tokens = sum(len(prompts[row]) for row in rows) + sum(outputs)
    lengths = [(float(len(prompts[row])), output) for row, output in zip(rows, outputs, strict=True)]
    compute_s = (1 - shared / tokens) * sum(MODEL.compute_s(*pair) for pair in lengths)
    memory_s = sum(MODEL.memory_s(*pair) for pair in lengths)
    return compute_s / memory_s if memory_s else math.inf


@given(PROMPTS, OUTPUTS)
def test_a_nodes_density_is_that_of_the_requests_below_it(prompts: list[Prompt], outputs: list[int]) -> None:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, outputs)
    tree = pool.tree
    for node, density in enumerate(node_densities(tree, pool.work).tolist()):
        rows = tree.rows[tree.first[node] : tree.end[node]].tolist()
        assert density == pytest.approx(density_of(pool, prompts, rows))


@given(PROMPTS, OUTPUTS)
def test_children_stand_by_density_in_sorted_layers(prompts: list[Prompt], outputs: list[int]) -> None:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, outputs)
    tree = sort_layers(pool.tree, pool.work)
    of_node = node_densities(tree, pool.work)
    of_row = (pool.work.compute_s / pool.work.memory_s)[tree.rows]
    for parent in range(NO_NODE, len(tree.parent)):
        nodes, rows = np.flatnonzero(tree.parent == parent), np.flatnonzero(tree.node == parent)
        children = [(int(tree.first[node]), of_node[node]) for node in nodes]
        children += [(int(row), of_row[row]) for row in rows]
        densities = [density for _, density in sorted(children)]
        assert all(a >= b * (1 - 1e-9) for a, b in pairwise(densities))


@given(PROMPTS, OUTPUTS)
def test_sorting_layers_changes_no_node(prompts: list[Prompt], outputs: list[int]) -> None:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, outputs)
    tree = sort_layers(pool.tree, pool.work)
    assert sorted(tree.rows.tolist()) == list(range(len(prompts)))
    for node in range(len(tree.parent)):
        before = pool.tree.rows[pool.tree.first[node] : pool.tree.end[node]]
        assert sorted(tree.rows[tree.first[node] : tree.end[node]].tolist()) == sorted(before.tolist())
    node_of = dict(zip(pool.tree.rows.tolist(), pool.tree.node.tolist(), strict=True))
    assert tree.node.tolist() == [node_of[row] for row in tree.rows.tolist()]


def test_an_outlier_is_split_off_where_that_costs_little_sharing(tmp_path: Path) -> None:
    # 300 short answers and one of 4,000 tokens on one prefix of 64: it goes to the other end, behind the group of 50.
    prompts = grouped((301, 64, 16), (10, 160, 16))
    pool = made(tmp_path, prompts, [4000, *[2] * 300, *[50] * 10])
    ranked = rank(pool.tree, pool.work)
    assert ranked.rows.tolist()[-1] == 0
    assert np.count_nonzero(np.diff(ranked.piece)) == 2
    kept = ranked.shared_tokens.sum() / pool.shared_tokens.sum()
    assert kept == (299 * 64 + 9 * 160) / (300 * 64 + 9 * 160)
    assert kept > 0.99


def test_what_would_cost_too_much_sharing_stays(tmp_path: Path) -> None:
    prompts = grouped((20, 64, 16), (10, 160, 16))
    pool = made(tmp_path, prompts, [4000, *[2] * 19, *[50] * 10])
    ranked = rank(pool.tree, pool.work)
    assert ranked.shared_tokens.sum() == pool.shared_tokens.sum()
    assert rank(pool.tree, pool.work, kept_sharing=0.9).rows.tolist()[-1] == 0


def test_where_nearly_all_is_shared_a_split_must_be_worth_what_it_computes_again(tmp_path: Path) -> None:
    # 301 short questions about a document of 1,600 tokens, one with a long answer: to part them is 0.3% of what they
    # share, and 21% of the 7,603 tokens that are computed.
    pool = made(tmp_path, grouped((301, 1600, 16)), [587, *[2] * 300])
    computed_tokens = 1600 + 301 * 16 + 587 + 300 * 2
    assert rank(pool.tree, pool.work).shared_tokens.sum() == 299 * 1600
    for repeated_share, num_splits in ((1599.5 / computed_tokens, 0), (1600.5 / computed_tokens, 1)):
        ranked = rank(pool.tree, pool.work, repeated_share=repeated_share)
        assert ranked.shared_tokens.sum() == (300 - num_splits) * 1600
    assert rank(pool.tree, pool.work, repeated_share=REPEATED_SHARE).shared_tokens.sum() == 300 * 1600


@pytest.mark.parametrize(("order", "kept"), [(DUAL_SCAN, 300)])
def test_ours_has_that_bound(tmp_path: Path, order: str, kept: int) -> None:
    prompts, outputs = grouped((301, 1600, 16)), [587, *[2] * 300]
    tokens = written(tmp_path, prompts)
    rows = PooledRows([PooledJob("a", tokens, np.ones(301, np.bool_), np.full(301, 4096))], unit_tokens=16)
    plan = rows.plan(order, [(0, row, float(output)) for row, output in enumerate(outputs)], MODEL, kv_tokens=100_000)
    assert plan.ends is not None
    held_tokens = np.frombuffer(plan.ends.held_tokens, RAW)
    assert np.count_nonzero(held_tokens < 1600) == kept  # the others compute the document


def test_a_crumb_is_not_split_off() -> None:
    # One row of another density in a piece of 1,000, with a little less work than counts; then with a little more.
    shared = np.array([0, *[1] * 999])
    compute_s, memory_s = np.ones(1000), np.ones(1000)
    for work, starts in ((CRUMB_SHARE * 0.9, [0]), (CRUMB_SHARE * 1.1, [0, 999])):
        compute_s[-1], memory_s[-1] = 0.394 * work * 1998, 0.606 * work * 1998
        assert split(shared, compute_s, memory_s, 100.0).tolist() == starts


def test_splits_go_on_within_what_was_split_off() -> None:
    densities = np.repeat([16.0, 4.0, 1.0], 20)
    starts = split(np.array([0, *[1] * 59]), densities, np.ones(60), 2.0)
    assert starts.tolist() == [0, 20, 40]


@given(PROMPTS, OUTPUTS)
def test_pieces_stand_by_density_and_keep_the_sharing(prompts: list[Prompt], outputs: list[int]) -> None:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, outputs)
    ranked = rank(pool.tree, pool.work)
    assert sorted(ranked.rows.tolist()) == list(range(len(prompts)))
    pieces = [ranked.piece == number for number in range(len(np.unique(ranked.piece)))]
    densities = [ranked.compute_s[piece].sum() / ranked.memory_s[piece].sum() for piece in pieces]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(densities))
    assert ranked.shared_tokens.sum() >= 0.99 * pool.shared_tokens.sum()
