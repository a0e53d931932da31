"""The experiment in its smallest form."""

import pytest

from neaptide_lab.experiments.w5 import stop_between_layers
from neaptide_lab.experiments.w5.machine import LIVE_MACHINE, Bench, Size

SMALL = Size(loads=(0.1,), duration_s=20.0, window_s=(2.0, 19.0), seeds=(0,))


def test_the_machine_does_what_was_measured_on_it() -> None:
    """Ceilings of 1,223 to 1,355 tokens/s, and a stream at 10 ms a token in the engine."""
    bench = Bench.of(LIVE_MACHINE, stop_between_layers.QUICK)
    assert 1223 <= bench.ceiling_tokens_per_s <= 1355
    assert bench.tpot_slo_s(0.1) == pytest.approx(2.4 * 0.0100, rel=0.1)


@pytest.mark.full
def test_steps_that_are_given_up_are_compared_with_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_between_layers, "QUICK", SMALL)
    result = stop_between_layers.run(quick=True)
    ours = {row.case.removeprefix(f"{LIVE_MACHINE.name}, 0.1, "): row for row in result.rows}
    assert list(ours) == [f"given up: {measure}" for measure in ("TTFT p50", "TTFT p99", "both targets", "offline")]
    assert all(row.ours > 0.0 for row in ours.values())
    runs = result.data["machines"][LIVE_MACHINE.name]["loads"]["0.1"]["runs"]
    assert runs["whole steps"]["given_up"] == 0.0
    assert runs["given up"]["given_up"] > 0.0
