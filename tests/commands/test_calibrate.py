"""``neaptide calibrate``: what it refuses before it measures, and what it says of a busy machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest

from neaptide.cli import main
from neaptide.commands import calibration
from neaptide.engine.clock import VirtualClock
from neaptide.estimator.calibration.calibrate import QUICK, Calibration, CalibrationPace, Measurements
from neaptide.estimator.calibration.micro_runs import MicroRunner
from neaptide.estimator.calibration.report import OURS, CalibrationReport, report
from neaptide.estimator.calibration.steps import CalibrationLimits
from neaptide.estimator.calibration.times import load_times
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.subject import Subject
from neaptide.launch.calibrating import calibrate_model
from tests.estimator.machine_executor import MachineExecutor

LIMITS = CalibrationLimits(max_batched_tokens=256, max_seqs=8, max_model_len=1024, kv_tokens=2048 * 16)


@pytest.fixture(scope="module")
def found() -> CalibrationReport:
    executor = MachineExecutor(VirtualClock())
    runner = MicroRunner(executor, executor.clock, 16)
    return report(Calibration(runner, executor.clock, LIMITS, replace(QUICK, max_rounds=1)).measure())


def must_not_measure(*_: Any, **__: Any) -> Never:
    raise AssertionError("it measured first")


@pytest.mark.parametrize(
    "option",
    [
        ["--budget-s", "nan"],
        ["--budget-s", "inf"],
        ["--budget-s", "0"],
        ["--budget-s", "-1"],
        ["--budget-s", "soon"],
        ["--num-threads", "-1"],
        ["--num-threads", "1.5"],
    ],
)
def test_numbers_without_meaning_are_refused(
    option: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", "--out", str(tmp_path / "p.json"), *option])
    assert f"argument {option[0]}: {option[1]!r} is not a" in capsys.readouterr().err


@pytest.mark.parametrize(("out", "complaint"), [(".", "is a directory"), ("no/p.json", "no such directory")])
def test_where_no_profile_can_be_written_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, out: str, complaint: str
) -> None:
    monkeypatch.setattr(calibration, "calibrate_model", must_not_measure)
    assert main(["calibrate", "--out", str(tmp_path / out)]) == 2
    assert complaint in capsys.readouterr().err


def test_the_times_are_kept_beside_the_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, found: CalibrationReport
) -> None:
    subject = Subject.of(MachineExecutor(VirtualClock()), "tiny", 16)
    monkeypatch.setattr(calibration, "calibrate_model", lambda *_, **__: (found, subject))
    assert main(["calibrate", "--out", str(tmp_path / "p.json")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json", "p.times.json.gz"]
    assert report(load_times(tmp_path / "p.times.json.gz")).chosen.ours.costs == found.chosen.ours.costs
    assert "p.times.json.gz" in capsys.readouterr().out.replace("\n", "")


def test_a_model_that_is_not_there_is_unusable_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["calibrate", "--model", str(tmp_path / "nosuch"), "--out", str(tmp_path / "p.json")]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "neaptide calibrate: " in shown.err


def test_too_little_time_to_fit_anything_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calibration, "measure", lambda _self: Measurements(held_out=frozenset(), grid=frozenset()))
    with pytest.raises(ValueError, match=r"1 s are too short for a calibration: .*no step for fitting was measured"):
        calibrate_model("neaptide-tiny", CalibrationPace(1.0, 0.5, 1), num_threads=1)


def test_nothing_is_said_of_a_quiet_machine(found: CalibrationReport) -> None:
    assert calibration.busy_warning(found) == ""


def test_a_machine_whose_speed_wandered_is_named_busy(found: CalibrationReport) -> None:
    reference_s = [1.0] * 20 + [2.0] * 20
    busy = replace(found, measurements=replace(found.measurements, reference_s=reference_s))
    assert calibration.busy_warning(busy) == (
        "The machine was probably busy: its speed drifted by 67%. Repeat this when it is otherwise idle."
    )


def test_an_error_above_the_bound_asks_for_a_quiet_machine(found: CalibrationReport) -> None:
    mape = {**found.raw.mape, OURS: {**found.raw.mape[OURS], Regime.DECODE: 0.3}}
    above = replace(found.raw, mape=mape)
    shown = calibration.busy_warning(replace(found, raw=above, normalised=above))
    assert shown == (
        "The machine was probably busy: the error is above the bound in decode. Repeat this when it is otherwise idle."
    )
