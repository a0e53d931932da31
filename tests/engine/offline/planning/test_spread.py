"""Long and short answers mixed at the sparse end of an order."""

from dataclasses import replace

import numpy as np
import pytest

from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.planning.blend import PoolWork, Ranked
from neaptide.engine.offline.planning.spread import LARGE_SHARE, LAST_SHARE, MIN_ROWS, spread
from neaptide.engine.offline.prefix_tree import PrefixTree

MODEL = DensityModel.in_seconds(1e-3, 1e-6)
KV_TOKENS = 100_000


Case = tuple[Ranked, PrefixTree, PoolWork]


def case_of(prompts: list[int], outputs: list[int], nodes: list[int], shared: list[int], pieces: list[int]) -> Case:
    """Rows that stand by density as they are numbered; prefixes of 16 tokens, the deeper ones below the first."""
    work = PoolWork.of(MODEL, np.array(prompts, np.int64), np.array(outputs, float))
    shared_tokens = np.array(shared, np.int64)
    compute_s = work.compute_s * (1.0 - shared_tokens / (work.prompt_tokens + work.output_tokens))
    node = np.array(nodes, np.int64)
    count = max([*nodes, -1]) + 1
    parent, depth = np.array([-1, *[0] * count])[:count], np.array([16, *[32] * count])[:count]
    first, end = np.zeros(count, np.int64), np.full(count, len(prompts))
    tree = PrefixTree(np.arange(len(prompts)), node, parent, depth, first, end)
    return (
        Ranked(np.arange(len(prompts)), shared_tokens, compute_s, work.memory_s, np.array(pieces, np.int64)),
        tree,
        work,
    )


def lone(prompts: list[int], outputs: list[int]) -> Case:
    """Rows that share nothing."""
    count = len(prompts)
    return case_of(prompts, outputs, [-1] * count, [0] * count, list(range(count)))


LENGTHS = list(range(100, 4100, 100))


COUNT = len(LENGTHS)


def test_any_run_of_a_mixed_end_has_long_and_short_answers() -> None:
    ranked, tree, work = lone([60_000] * COUNT + [20] * COUNT, [2] * COUNT + LENGTHS)
    found = spread(ranked, tree, work, kv_tokens=0)
    assert found.rows[:COUNT].tolist() == list(range(COUNT))  # the dense end is as it was
    answers = work.output_tokens[found.rows[COUNT:]]
    assert sorted(answers) == LENGTHS
    for eight in answers.reshape(-1, 8):
        assert eight.mean() == pytest.approx(np.mean(LENGTHS), rel=0.25)
    assert found.memory_s.tolist() == work.memory_s[found.rows].tolist()
    assert found.compute_s.sum() == pytest.approx(ranked.compute_s.sum())


def test_what_starts_last_goes_by_length() -> None:
    """The back of the order starts first."""
    ranked, tree, work = lone([60_000] * COUNT + [20] * COUNT, [2] * COUNT + LENGTHS)
    found = spread(ranked, tree, work, KV_TOKENS)
    rising = np.diff(work.output_tokens[found.rows[COUNT:]]) > 0
    num_last = int(np.flatnonzero(~rising)[0]) + 1
    last, most = found.rows[COUNT : COUNT + num_last], LAST_SHARE * KV_TOKENS * max(LENGTHS)
    read_tokens = work.output_tokens[last] * (20 + work.output_tokens[last] / 2.0)
    assert 2 < num_last < COUNT - 2
    assert most / 2 < read_tokens.sum() <= most


def test_rows_of_one_prefix_are_mixed_across_the_pieces_that_it_was_parted_into() -> None:
    shared = [0] * COUNT + ([0] + [16] * (COUNT // 2 - 1)) * 2
    pieces = [*range(COUNT), *[COUNT] * (COUNT // 2), *[COUNT + 1] * (COUNT // 2)]
    ranked, tree, work = case_of(
        [60_000] * COUNT + [32] * COUNT, [2] * COUNT + LENGTHS, [-1] * COUNT + [0] * COUNT, shared, pieces
    )
    found = spread(ranked, tree, work, 0)
    assert found.rows.tolist() != ranked.rows.tolist()
    assert sorted(found.rows[COUNT:]) == list(range(COUNT, 2 * COUNT))
    assert found.shared_tokens[COUNT:].tolist() == [0] + [16] * (COUNT - 1)
    assert set(found.piece[COUNT:]) == {COUNT}
    whole_s = work.compute_s[found.rows[COUNT:]]
    tokens = 32 + work.output_tokens[found.rows[COUNT:]]
    assert found.compute_s[COUNT] == pytest.approx(whole_s[0])
    assert found.compute_s[COUNT + 1] == pytest.approx(whole_s[1] * (1 - 16 / tokens[1]))


def test_rows_of_other_prefixes_keep_their_places() -> None:
    nodes = [-1] * COUNT + [1 + k % 2 for k in range(COUNT)]
    ranked, tree, work = case_of(
        [60_000] * COUNT + [48] * COUNT,
        [2] * COUNT + LENGTHS,
        nodes,
        [0] * COUNT + [0] + [16] * (COUNT - 1),
        [0] * 2 * COUNT,
    )
    assert spread(ranked, tree, work, 0).rows.tolist() == list(range(2 * COUNT))


def test_few_rows_stay() -> None:
    count = MIN_ROWS - 1
    ranked, tree, work = lone([60_000] * 9 + [20] * count, [2] * 9 + LENGTHS[:count])
    assert spread(ranked, tree, work, 0).rows.tolist() == list(range(9 + count))


def test_large_prompts_come_first_unless_they_share_much() -> None:
    large = int(LARGE_SHARE * KV_TOKENS) + 17
    prompts = [600] * 20 + [large, large, 600]
    ranked, tree, work = case_of(
        prompts + [20] * 4,
        [2] * 23 + [4000] * 4,
        [0] * 23 + [-1] * 4,
        [0] + [16] * 22 + [0] * 4,
        [0] * 23 + [1, 2, 3, 4],
    )
    found = spread(ranked, tree, work, KV_TOKENS)
    assert found.rows.tolist() == [20, 21, *range(20), *range(22, 27)]
    assert found.shared_tokens[:4].tolist() == [0, 0, 0, 16]
    assert len(set(found.piece[:3])) == 3
    costly = replace(tree, depth_tokens=np.array([large // 2]))
    assert spread(ranked, costly, work, KV_TOKENS).rows.tolist() == list(range(27))


def test_an_empty_pool_is_empty() -> None:
    ranked, tree, work = lone([], [])
    assert not len(spread(ranked, tree, work, KV_TOKENS).rows)
