"""Tokens computed again count once they are computed, not when their KV is dropped."""

import numpy as np

from neaptide.engine.messages import StepStats
from neaptide.engine.table import RequestTable
from tests.engine.harness import Harness, flex, online


def steps_of(harness: Harness) -> list[StepStats]:
    stats: list[StepStats] = []
    while harness.core.has_work:
        stats += harness.core.step().stats
    return stats


def test_what_the_cache_kept_is_not_computed_again() -> None:
    """Seven blocks of four tokens. The batch line has computed 12 when a chat takes six blocks. The cache keeps one."""
    harness = Harness(num_blocks=7, overlap_depth=0)
    harness.core.handle(flex("line", list(range(12)), max_tokens=6))
    before = harness.core.step().stats
    harness.core.handle(online("chat", list(range(100, 122)), max_tokens=2))
    stats = before + steps_of(harness)
    assert sum(each.preempted_offline for each in stats) == 1
    recomputed = [each.recomputed_tokens for each in stats]
    assert recomputed[0] == 0
    assert sum(recomputed) == 8
    at = next(index for index, each in enumerate(stats) if each.preempted_offline)
    assert recomputed[at] == 0, "dropped is not yet computed again"
    assert {index: each.dropped_tokens for index, each in enumerate(stats) if each.dropped_tokens} == {at: 12}


def test_a_run_without_preemptions_computes_nothing_again() -> None:
    harness = Harness(num_blocks=64, overlap_depth=0)
    harness.core.handle(flex("line", list(range(12)), max_tokens=6))
    harness.core.handle(online("chat", list(range(12)), max_tokens=6))
    assert {each.recomputed_tokens for each in steps_of(harness)} == {0}


def test_a_table_counts_what_a_slot_had_before() -> None:
    table = RequestTable(3, 64, 4)
    table.reached[:2] = 10, 4
    rows, starts = np.array([0, 1, 2]), np.array([4, 8, 0])
    assert table.num_recomputed(rows, starts, starts + 3) == 3
    assert table.num_recomputed(rows, starts, starts + 20) == 6
    assert table.num_recomputed(rows[2:], starts[2:], starts[2:] + 20) == 0
