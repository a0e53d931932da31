"""What counts as online load."""

import pytest

from neaptide.engine.scheduler.online_load import LoadMeter


def test_prompts_count_for_ten_seconds() -> None:
    meter = LoadMeter()
    meter.note(0.0, 1_000)
    meter.note(4.0, 500)
    assert meter.load(10.0, 0.25, 0.002) == pytest.approx(0.25 + 150.0 * 0.002)
    assert meter.load(10.1, 0.25, 0.002) == pytest.approx(0.25 + 50.0 * 0.002)
    assert meter.load(30.0, 0.25, 0.002) == 0.25
