"""The order of a pool under every policy."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.offline.planning.plan import PLANNED_POLICIES, in_groups, plan_pool
from neaptide.engine.offline.planning.prefix_groups import Prefixes, best_single_level
from tests.engine.offline.planning.files import Prompt
from tests.engine.offline.planning.pools import OUTPUTS, PROMPTS, grouped, made


@pytest.mark.parametrize("policy", PLANNED_POLICIES)
@given(prompts=PROMPTS, outputs=OUTPUTS, num_replicas=st.integers(1, 3))
@settings(max_examples=30)
def test_every_row_runs_once(policy: str, prompts: list[Prompt], outputs: list[int], num_replicas: int) -> None:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, outputs)
    orders = plan_pool(pool, policy, num_replicas)
    assert len(orders) == num_replicas
    assert sorted(np.concatenate(orders).tolist()) == list(range(len(prompts)))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", [0, 1, 2, 3, 4]),
        # by token: 4 alone, then the two of 10, then the two of 20
        ("dfs", [4, 1, 3, 0, 2]),
        # groups by their first rows
        ("neaptide", [0, 2, 1, 3, 4]),
        # by what a group computes: 1 token, 16 + 2, 32 + 2
        ("batchllm", [4, 1, 3, 0, 2]),
    ],
)
def test_orders_by_hand(tmp_path: Path, policy: str, expected: list[int]) -> None:
    prompts = [[20] * 32 + [1], [10] * 16 + [1], [20] * 32 + [2], [10] * 16 + [2], [3]]
    pool = made(tmp_path, prompts, [1] * 5)
    (rows,) = plan_pool(pool, policy)
    assert rows.tolist() == expected


def test_runs_are_counted_as_an_order_has_them(tmp_path: Path) -> None:
    pool = made(tmp_path, grouped((2, 16, 1), (2, 16, 1), (1, 0, 1)), [1] * 5)
    assert pool.num_runs(np.array([0, 1, 2, 3, 4])) == 3
    assert pool.num_runs(np.array([0, 2, 1, 3, 4])) == 5


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
