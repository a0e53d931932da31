"""Whatever of the disk is away, older, cut or flipped, in whatever moment of a batch: no line ends for it that could be
run, no result that was shown changes, and what cannot be mended is named at the start."""

import asyncio
import gc
import logging
from pathlib import Path

import pytest

from neaptide.server.batches.running import job_runner, state_machine
from neaptide.server.batches.storing import disk_patience
from neaptide.server.batches.storing.databases import writer
from tests.server.batches.older.rounds import HARMS, MOMENTS, OBJECTS, Plot, Round

ALL = range(200)
SAMPLE = ALL[6::10]
"""Among them an older database beside a batch that was complete."""


@pytest.mark.parametrize(
    "seed", [seed if seed in SAMPLE else pytest.param(seed, marks=pytest.mark.full) for seed in ALL]
)
def test_harm_to_the_disk(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (disk_patience, "FIRST_DELAY_S"),
        (disk_patience, "MAX_DELAY_S"),
        (job_runner, "RETRY_DELAY_S"),
        (state_machine, "FIRST_RELOAD_DELAY_S"),
        (state_machine, "LONGEST_RELOAD_DELAY_S"),
    ):
        monkeypatch.setattr(module, name, 0.01)
    # Every second time the log is all that has what came last.
    monkeypatch.setattr(writer, "QUIET_S", (0.005, 600.0)[seed % 2])
    caplog.set_level(logging.WARNING)

    def messages() -> list[str]:
        found = list(caplog.messages)
        caplog.clear()
        return found

    one = Round(seed, tmp_path, messages)
    plot = one.plot
    assert asyncio.run(one.run()) == [], f"{plot}"
    gc.collect()  # what was mapped goes with its round


def test_the_rounds_come_to_everything() -> None:
    plots = [Plot.drawn(seed) for seed in ALL]
    for thing in ("input", "results", "log"):
        found = {(plot.harm, plot.moment) for plot in plots if plot.thing == thing}
        assert found == {(harm, moment) for harm in HARMS if harm != "older" for moment in MOMENTS}
    found = {(plot.harm, plot.moment) for plot in plots if plot.thing == "database"}
    assert found == {(harm, moment) for harm in HARMS for moment in MOMENTS}
    found = {(plot.harm, plot.moment) for plot in plots if plot.thing == "everything"}
    assert found == {(harm, moment) for harm in ("away", "older") for moment in MOMENTS}
    sample = [Plot.drawn(seed) for seed in SAMPLE]
    assert {plot.thing for plot in sample} == set(OBJECTS)
    assert any((plot.thing, plot.harm, plot.moment) == ("database", "older", "complete") for plot in sample)
