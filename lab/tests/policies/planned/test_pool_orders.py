"""The papers' orders of the offline pool."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.tests.again import again
from neaptide.engine.extensions import ExtensionError
from neaptide.engine.offline.planning.plan import PromptPool, plan_pool
from neaptide_lab.policies import ORDERS
from neaptide_lab.policies.pool_orders import in_groups
from neaptide_lab.policies.prefix_groups import (
    Prefixes,
    best_single_level,
    enlarged_first_level,
    multi_level_saving,
)
from tests.commands.test_offline_plan import PREFIX, batch, planned
from tests.engine.offline.planning import test_blend as blend
from tests.engine.offline.planning import test_plan as plans
from tests.engine.offline.planning import test_robustness as robustness
from tests.engine.offline.planning.files import Prompt
from tests.engine.offline.planning.pools import OUTPUTS, PROMPTS, grouped, made
from tests.engine.offline.planning.test_robustness import COPIES, DEEP, UNIT

ROWS = [name for name in ORDERS if name != "density"]
"""Orders that say which row comes when."""
copies, chain = robustness.copies, robustness.chain

test_an_empty_pool = again(robustness.test_an_empty_pool_has_an_empty_plan, "order", ROWS)
test_a_single_request = again(robustness.test_a_single_request_is_the_plan, "order", ROWS)
test_50_000_duplicates = again(robustness.test_50_000_duplicates_run_one_after_the_other, "order", ROWS)
test_a_chain_of_10_000_prefixes = again(
    robustness.test_a_chain_of_10_000_prefixes_runs_once_in_every_order, "order", ROWS
)
test_one_giant_prompt = again(robustness.test_one_giant_prompt_among_small_ones, "order", ROWS)
test_by_hand = again(
    plans.test_orders_by_hand,
    "order,expected",
    [
        # by token: 4 alone, then the two of 10, then the two of 20
        ("dfs", [4, 1, 3, 0, 2]),
        # by what a group computes: 1 token, 16 + 2, 32 + 2
        ("batchllm", [4, 1, 3, 0, 2]),
    ],
)
test_splits_have_no_bound = again(blend.test_ours_has_that_bound, "order,kept", [("density", 299)])


@pytest.mark.parametrize("order", ROWS)
@given(prompts=PROMPTS, outputs=OUTPUTS, num_replicas=st.integers(1, 3))
@settings(max_examples=30)
def test_every_row_runs_once(order: str, prompts: list[Prompt], outputs: list[int], num_replicas: int) -> None:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, outputs)
    orders = plan_pool(pool, order, num_replicas)
    assert sorted(np.concatenate(orders).tolist()) == list(range(len(prompts)))


def test_an_order_that_an_engine_follows_from_both_sides_is_no_list(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match="'density' is for an engine"):
        plan_pool(made(tmp_path, [[1], [2]], [1, 1]), "density")


def test_50_000_duplicates_are_one_prefix_computed_once(copies: PromptPool) -> None:
    prefixes = Prefixes.of(copies.tree)
    for grouping in (enlarged_first_level(prefixes), best_single_level(prefixes)):
        assert grouping.saving == multi_level_saving(prefixes) == (COPIES - 1) * 4 * UNIT


def test_a_chain_of_10_000_prefixes_has_as_many_levels(chain: PromptPool) -> None:
    prefixes = Prefixes.of(chain.tree)
    assert prefixes.num_levels == DEEP - 1
    assert prefixes.depth_tokens.tolist() == list(range(UNIT, UNIT * DEEP, UNIT))
    assert multi_level_saving(prefixes) == UNIT * DEEP * (DEEP - 1) // 2


def test_algorithm_1_puts_a_chain_into_groups_of_three(chain: PromptPool) -> None:
    # A third member makes (leaves - 1) tokens exceed the child's; then the group is forked up to the top. The first two
    # prompts are left: they share the first.
    grouping = enlarged_first_level(Prefixes.of(chain.tree))
    members = grouping.num_members
    heads = np.flatnonzero(members)
    assert set(members[heads].tolist()) <= {1, 2, 3}
    assert members.sum() == DEEP
    by_hand = sum((int(members[head]) - 1) * UNIT * (int(head) + 1) for head in heads)
    assert grouping.saving == by_hand


def test_the_exact_groups_of_a_chain(chain: PromptPool) -> None:
    # Along a chain the choice is one of cut points: prompts from one open prefix to the next share it, and it is
    # computed once. best[k]: the most that the prompts from k on save if the prefix at k is open.
    best = np.zeros(DEEP + 1, np.int64)
    for k in range(DEEP - 1, -1, -1):
        members = np.arange(1, DEEP - k + 1)
        best[k] = ((members - 1) * (k + 1) + best[k + 1 :]).max()
    assert best_single_level(Prefixes.of(chain.tree)).saving == UNIT * best[0]


def test_batchllm_orders_groups_by_what_they_compute(tmp_path: Path) -> None:
    # The small group has 16 + 3 tokens to compute, the large one 48 + 2, the row alone 40.
    prompts = grouped((2, 48, 1), (3, 16, 1), (1, 0, 40))
    pool = made(tmp_path, prompts, [1] * 6)
    grouping = best_single_level(Prefixes.of(pool.tree))
    assert in_groups(pool.tree, pool.work.prompt_tokens, grouping).tolist() == [2, 3, 4, 5, 0, 1]


def test_blendserve_mixes_both_ends(tmp_path: Path) -> None:
    # The memory of 300 parts into about 125 and 175: one of 40 requests that hold 105 tokens for ten steps, two of ten
    # that hold 60 for a hundred. So ten of the first pass until the next two of the others start.
    prompts = grouped(*[(1, 0, 100)] * 40, *[(1, 0, 10)] * 10)
    pool = made(tmp_path, prompts, [*[10] * 40, *[100] * 10], kv_tokens=300)
    (rows,) = plan_pool(pool, "blendserve")
    long = [place for place, row in enumerate(rows.tolist()) if row >= 40]
    assert long[:4] == [0, 2, 13, 14]


def test_offline_plan_knows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = batch(tmp_path / "in.jsonl", [f"{PREFIX}{k}" for k in range(6)])
    words: tuple[Any, ...] = (path, "--policy", "blendserve", "--replicas", "2", "--order", tmp_path / "out.txt")
    found = planned(capsys, *words)
    parts = [(tmp_path / f"out.{k}.txt").read_text().split() for k in range(2)]
    assert sorted([*parts[0], *parts[1]]) == sorted(f"line-{k}" for k in range(6))
    assert [one["requests"] for one in found["replicas"]] == list(map(len, parts))


def test_batchllm_groups_a_set_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "batchllm-64-16-s4", "--policy", "batchllm", "--profile", "a100-80g-llama-3.1-8b")
    assert found["sharing"]["order"] == found["sharing"]["bound"] == pytest.approx(0.6)
    assert found["groups"] == 1600
