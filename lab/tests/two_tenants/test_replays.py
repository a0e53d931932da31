"""Runs with bidirectional blocks decide in a replay as they did, and copy the same slots."""

from pathlib import Path

import pytest

from neaptide.simulation.replay import Replay, replay
from neaptide.simulation.simulator import simulate
from neaptide_lab.two_tenants.counts import TenantCounts
from tests.simulation.scenes import mixed


@pytest.mark.parametrize("depth", [0, 1])
def test_blocks_with_two_tenants_replay(depth: int, tmp_path: Path) -> None:
    scenario = mixed(policy="bros", num_online=12, step_noise=0.1, overlap_depth=depth, host_cache_bytes=64 * 16)
    counts, again = TenantCounts(), TenantCounts()
    run = simulate(scenario, step_log=tmp_path / "log", observers=[counts])
    assert counts.num_checkpointed > 0
    assert counts.num_slots_saved > 100
    assert replay(tmp_path / "log", observers=[again]) == Replay(run.result.steps, None)
    assert again.steps == counts.steps
    text = (tmp_path / "log").read_text()
    (tmp_path / "other").write_text(text.replace('"slot_copies":true', '"slot_copies":false'))
    assert replay(tmp_path / "other").difference is not None
