"""Runs with bidirectional blocks decide in a replay as they did."""

from pathlib import Path

import pytest

from neaptide.simulation.replay import Replay, replay
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import mixed


@pytest.mark.parametrize("depth", [0, 1])
def test_blocks_with_two_tenants_replay(depth: int, tmp_path: Path) -> None:
    scenario = mixed(policy="bros", num_online=12, step_noise=0.1, overlap_depth=depth, host_cache_bytes=64 * 16)
    run = simulate(scenario, step_log=tmp_path / "log")
    assert run.result.preemptions.count_by_kind["checkpoint"] > 0
    assert run.result.preemptions.checkpointed_slots > 100
    assert replay(tmp_path / "log") == Replay(run.result.steps, None)
    text = (tmp_path / "log").read_text()
    (tmp_path / "other").write_text(text.replace('"two_tenant_blocks":true', '"two_tenant_blocks":false'))
    assert replay(tmp_path / "other").difference is not None
