"""The blast test over every other policy."""

from pathlib import Path

import pytest

from neaptide.engine.scheduler.policies import POLICIES
from tests.engine.test_blast import blast, num_preemptions

BASELINES = sorted(set(POLICIES) - {"neaptide"})


@pytest.mark.parametrize("policy", BASELINES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_every_accepted_request_ends_exactly_once(policy: str, seed: int, tmp_path: Path) -> None:
    assert num_preemptions(blast(seed, 300, tmp_path, policy)) > 0


@pytest.mark.full
@pytest.mark.parametrize("policy", BASELINES)
def test_every_accepted_request_ends_exactly_once_over_5000_steps(policy: str, tmp_path: Path) -> None:
    assert num_preemptions(blast(99, 5_000, tmp_path, policy)) > 0
