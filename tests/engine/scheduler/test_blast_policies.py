"""The blast test over every policy of the registry."""

from pathlib import Path

import pytest

from neaptide.engine.scheduler.policies import POLICIES
from tests.engine.test_blast import blast, num_preemptions

BASELINES = sorted(set(POLICIES) - {"neaptide"})
SELDOM_PREEMPTS = {"lpm"}
"""Policies that reserve so much at admission that a short run may see no preemption."""


@pytest.mark.parametrize("policy", BASELINES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_every_accepted_request_ends_exactly_once(policy: str, seed: int, tmp_path: Path) -> None:
    harness = blast(seed, 300, tmp_path, policy)
    assert num_preemptions(harness) > 0 or policy in SELDOM_PREEMPTS


@pytest.mark.full
@pytest.mark.parametrize("policy", BASELINES)
def test_every_accepted_request_ends_exactly_once_over_5000_steps(policy: str, tmp_path: Path) -> None:
    assert num_preemptions(blast(99, 5_000, tmp_path, policy)) > 0
