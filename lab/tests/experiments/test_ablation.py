"""Compares the policy without a part with the whole policy."""

from dataclasses import replace

import pytest

from neaptide_lab.experiments import ablation
from neaptide_lab.experiments.ablation import CODE, Size
from neaptide_lab.experiments.rivals import loads


def test_every_part_stands_beside_the_whole_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    load = replace(CODE, window_s=(1134.9, 1135.4), offline="batchllm-2000-200-s4", warm_up_s=0.2)
    monkeypatch.setattr(ablation, "QUICK", Size((load,), ("shares", "reuse-eviction")))
    monkeypatch.setattr(loads, "CLIENT_LIMIT_TOKENS", 8)
    monkeypatch.setattr(loads, "OFFLINE_REQUESTS", 100)
    result = ablation.run(quick=True)
    name = "azure_code_2023 without"
    assert [row.case for row in result.rows] == [
        f"{name} {part}: {what}" for part in ("shares", "reuse-eviction") for what in ("offline", "both targets")
    ]
    # The cache is large enough here: no block is evicted, and the whole policy's numbers stand on both sides.
    *_, offline, targets = result.rows
    assert offline.ours == offline.paper
    assert targets.ours == targets.paper
    assert offline.ours > 0
    assert any("nothing changes without reuse-eviction" in note for note in result.notes)
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert result.plot is not None
    result.plot(figure)
    assert len(figure.axes) == 1
