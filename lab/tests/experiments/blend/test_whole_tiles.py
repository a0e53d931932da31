"""A device whose matrix products take whole tiles: steps along a plan with two ends are as large as some of them."""

from dataclasses import replace

import msgspec
import pytest

from neaptide.engine.scheduler import offline_fill
from neaptide_lab.experiments.blend.setting import QUICK, trace_case


@pytest.mark.full
def test_steps_of_whole_tiles_are_worth_more_than_their_pace_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    case = trace_case(1, QUICK)
    case = replace(case, profile=msgspec.structs.replace(case.profile, tile_tokens=128))
    in_tiles = case.ran("neaptide")
    monkeypatch.setattr(offline_fill, "in_whole_tiles", lambda paced, others, tile: paced)
    as_paced = case.ran("neaptide")
    assert in_tiles.seconds < 0.97 * as_paced.seconds
    assert in_tiles.sharing == pytest.approx(as_paced.sharing, abs=1e-3)
