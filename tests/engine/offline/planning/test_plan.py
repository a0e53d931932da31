"""Orders of a pool, by hand and at random."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.offline.planning.plan import ORDERS, plan_pool
from tests.engine.offline.planning.files import Prompt
from tests.engine.offline.planning.pools import OUTPUTS, PROMPTS, grouped, made


@pytest.mark.parametrize("order", sorted(ORDERS))
@given(prompts=PROMPTS, outputs=OUTPUTS, num_replicas=st.integers(1, 3))
@settings(max_examples=30)
def test_every_row_runs_once(order: str, prompts: list[Prompt], outputs: list[int], num_replicas: int) -> None:
    with TemporaryDirectory() as directory:
        pool = made(Path(directory), prompts, outputs)
    orders = plan_pool(pool, order, num_replicas)
    assert len(orders) == num_replicas
    assert sorted(np.concatenate(orders).tolist()) == list(range(len(prompts)))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", [0, 1, 2, 3, 4]),
        # groups by their first rows
        ("neaptide", [0, 2, 1, 3, 4]),
    ],
)
def test_orders_by_hand(tmp_path: Path, order: str, expected: list[int]) -> None:
    prompts = [[20] * 32 + [1], [10] * 16 + [1], [20] * 32 + [2], [10] * 16 + [2], [3]]
    pool = made(tmp_path, prompts, [1] * 5)
    (rows,) = plan_pool(pool, order)
    assert rows.tolist() == expected


def test_runs_are_counted_as_an_order_has_them(tmp_path: Path) -> None:
    pool = made(tmp_path, grouped((2, 16, 1), (2, 16, 1), (1, 0, 1)), [1] * 5)
    assert pool.num_runs(np.array([0, 1, 2, 3, 4])) == 3
    assert pool.num_runs(np.array([0, 2, 1, 3, 4])) == 5
