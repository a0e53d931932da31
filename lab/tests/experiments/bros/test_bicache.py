"""The rows of figure 13 from made-up runs, and a tiny run of both arms."""

import msgspec
import pytest

from neaptide.simulation.result import SimResult
from neaptide_lab.experiments.bros import bicache, setting
from neaptide_lab.experiments.bros.bicache import WITH, WITHOUT, BicacheSize, bicache_rows


def test_attainment_and_offline_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bicache, "QUICK", BicacheSize(2.0, ("LMSYS",), (16,)))
    monkeypatch.setattr(bicache, "DRAIN_S", 1.0)
    monkeypatch.setattr(setting, "DRAIN_S", 1.0)
    result = bicache.run(quick=True)
    arms = result.data["runs"]["LMSYS, from 16"]
    assert arms[WITH]["settings"]["num_host_blocks"] > 0
    assert arms[WITHOUT]["settings"]["num_host_blocks"] == 0
    one = msgspec.convert(arms[WITH], SimResult)
    one.online.attainment |= {"ttft": 0.9, "tpot": 0.6}
    other = msgspec.convert(arms[WITHOUT], SimResult)
    other.online.attainment |= {"ttft": 0.6, "tpot": 0.5}
    one.offline.tokens_per_s, other.offline.tokens_per_s = 1100.0, 1000.0
    ours = {row.case: (row.ours, row.paper) for row in bicache_rows(("LMSYS", 16), {WITH: one, WITHOUT: other})}
    assert ours["LMSYS, from 16: TTFT attained, with / without"] == (pytest.approx(1.5), 1.23)
    assert ours["LMSYS, from 16: TPOT attained, with / without"] == (pytest.approx(1.2), 1.63)
    assert ours["LMSYS, from 16: offline tokens, with against without"][0] == pytest.approx(10.0)
