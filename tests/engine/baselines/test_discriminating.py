"""A policy that never differs from ``fcfs`` is a bug: one trace on which each must."""

from pathlib import Path

import pytest

from neaptide.engine.params import Tier
from neaptide.engine.scheduler.policies import POLICIES, find_policy
from tests.engine.harness import Harness, batch, online
from tests.engine.offline.planning.orders import plan, two_ends

PREFIXES = [[7] * 40, [8] * 40, [9] * 40]


def schedule(policy: str, directory: Path) -> list[dict[str, int]]:
    """A job whose rows take turns on three prefixes; online requests come while it runs."""
    harness = Harness(num_blocks=60, policy=policy, max_num_seqs=4, max_num_batched_tokens=64)
    prompts = [PREFIXES[row % 3] + [10 + row] * (1 + row) for row in range(9)]
    harness.core.handle(batch(directory, "job", prompts, max_tokens=12))
    if find_policy(policy).planned_order is not None:
        densities = [9.0 - row for row in range(9)]
        ends = two_ends([60] * 9, densities, 4.0) if find_policy(policy).planned_order == "density" else None
        harness.core.handle(plan(*(("job", row) for row in (0, 3, 6, 1, 4, 7, 2, 5, 8)), ends=ends))
    steps = []
    for index in range(6):
        steps += [harness.step(), harness.step()]
        tier = Tier.PRIORITY if index == 3 else Tier.DEFAULT
        prompt = [30 + index] * (6 + 9 * index)
        harness.core.handle(online(f"o{index}", prompt, max_tokens=5, arrival_s=harness.clock.now(), tier=tier))
    return steps + harness.run()


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"fcfs"}))
def test_schedule_is_not_that_of_fcfs(policy: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert schedule(policy, tmp_path / "a") != schedule("fcfs", tmp_path / "b")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_schedule_is_the_same_each_time(policy: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert schedule(policy, tmp_path / "a") == schedule(policy, tmp_path / "b")
