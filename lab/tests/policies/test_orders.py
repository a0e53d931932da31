"""dfs and balance: the offline pool in another order under the same engine."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter
from neaptide_lab.policies.orders import by_prefix, mix, shuffled
from tests.engine.harness import Harness, batch

COMMON = [1] * 8
GROUPS = [[group] * 8 for group in (30, 10, 20)]
"""Three groups of 8 tokens behind 8 tokens that all prompts share: whole blocks of 4."""
PROMPTS = [COMMON + GROUPS[row % 3] + [100 + row] * 3 for row in range(12)]
"""Handed in one group after the other, so that neighbours share least."""


def cached_tokens(policy: str, tmp_path: Path) -> int:
    """Prompt tokens of all rows found in a cache of 6 blocks, one request of 5 blocks at a time."""
    harness = Harness(policy=policy, num_blocks=6, max_num_seqs=1)
    harness.core.handle(batch(tmp_path, policy, PROMPTS, max_tokens=1))
    harness.run()
    assert len(harness.ends) == len(PROMPTS)
    return sum(output.num_cached_tokens for (output,) in harness.ends.values())


def test_dfs_shares_as_much_as_an_unlimited_cache_and_fcfs_does_not(tmp_path: Path) -> None:
    # Bound: the common part is computed once for 12 rows, each group's part once for 4 rows.
    assert cached_tokens("dfs", tmp_path) == 11 * 8 + 3 * 3 * 8
    # Between two rows of one group two others have run: of the group's blocks nothing is left.
    assert cached_tokens("fcfs", tmp_path) == 11 * 8
    assert cached_tokens("balance", tmp_path) < 11 * 8 + 3 * 3 * 8


def test_dfs_shares_as_much_when_the_rows_come_in_several_messages(tmp_path: Path) -> None:
    harness = Harness(policy="dfs", num_blocks=6, max_num_seqs=1)
    whole = batch(tmp_path, "job", PROMPTS, max_tokens=1)
    for rows in (range(5), range(5, 12)):
        part = msgspec.structs.replace(whole, rows=list(rows), params_index=[0] * len(rows))
        harness.core.handle(part)
    harness.run()
    assert sum(output.num_cached_tokens for (output,) in harness.ends.values()) == 11 * 8 + 3 * 3 * 8


def saved_tokens(policy: str, tmp_path: Path) -> int:
    """Prompt tokens not computed, of 40 groups of 4 prompts that share 16 tokens of 22: 2.7 prompts a step of 64
    tokens where nothing is shared, all seats free, a cache for 15 prompts."""
    prompts = [[100 + row % 40] * 16 + [200 + row] * 6 for row in range(160)]
    harness = Harness(policy=policy, num_blocks=90, max_num_batched_tokens=64)
    harness.core.handle(batch(tmp_path, policy, prompts, max_tokens=1))
    computed = sum(sum(step.values()) for step in harness.run())
    assert len(harness.ends) == len(prompts)
    return 160 * 22 - computed


def test_dfs_reaches_the_bound_with_all_seats_and_a_shuffled_fcfs_does_not(tmp_path: Path) -> None:
    bound = 40 * 3 * 16
    assert saved_tokens("dfs", tmp_path) == bound
    assert 0 < saved_tokens("balance", tmp_path) < bound


def test_dfs_walks_the_prefix_tree_in_the_order_of_the_tokens(tmp_path: Path) -> None:
    harness = Harness(policy="dfs", max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "job", [[300], [2, 9], [2], [255, 1], [2, 7, 7]], max_tokens=1))
    # 255 before 300 although its low byte is larger; a prompt before those that go on from it.
    assert [next(iter(step)) for step in harness.run()] == ["job:2", "job:4", "job:1", "job:3", "job:0"]


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), min_size=1, max_size=12))
def test_prompts_sort_by_their_keys_as_by_their_tokens(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    directory = tmp_path_factory.mktemp("tokens")
    with TokenFileWriter(directory / "job") as writer:
        for prompt in prompts:
            writer.append(prompt)
    tokens = TokenFile(directory / "job")
    by_key = sorted(range(len(prompts)), key=lambda row: by_prefix(tokens, row))
    assert by_key == sorted(range(len(prompts)), key=prompts.__getitem__)


def test_balance_is_a_permutation_that_the_seed_decides(tmp_path: Path) -> None:
    message = batch(tmp_path, "job", [[row + 1] for row in range(40)])
    orders = []
    for seed in (0, 0, 1):
        pool = OfflinePool(shuffled(seed))
        pool.add_batch(message, 0.0, 64)
        orders.append([int(pool.pop().request_id.partition(":")[2]) for _ in range(40)])
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] == orders[1] != orders[2]
    assert list(range(40)) not in orders


def test_mixing_is_that_of_splitmix64_and_spreads_rows_evenly() -> None:
    # The first outputs of the published generator for seed 0.
    assert [mix(0), mix(1)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    in_upper_half = sum(mix(row) >= 2**63 for row in range(10_000))
    assert 4_800 < in_upper_half < 5_200
