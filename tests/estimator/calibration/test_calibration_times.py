"""Raw times: kept whole beside the profile, and what is worked out from them again is what was worked out first."""

import gzip
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.estimator.calibration.calibrate import Calibration, CalibrationPace, Measurements
from neaptide.estimator.calibration.micro_runs import MicroRunner
from neaptide.estimator.calibration.report import report
from neaptide.estimator.calibration.steps import CalibrationLimits
from neaptide.estimator.calibration.times import CalibrationTimes, load_times, save_times, times_path
from tests.estimator.machine_executor import MachineExecutor

LIMITS = CalibrationLimits(max_batched_tokens=512, max_seqs=16, max_model_len=1024, kv_tokens=2048 * 16)


@pytest.fixture(scope="module")
def measured() -> Measurements:
    """Of a machine that slows down, with steps left out."""
    clock = VirtualClock()
    executor = MachineExecutor(clock, slow=lambda: 1.0 + 0.02 * clock.now())
    pace = CalibrationPace(budget_s=15.0, max_step_s=0.05, max_rounds=3)
    return Calibration(MicroRunner(executor, clock, 16), clock, LIMITS, pace).measure()


def test_every_time_is_read_back_as_it_was_measured(measured: Measurements, tmp_path: Path) -> None:
    path = times_path(tmp_path / "cpu-mine.json")
    assert path.name == "cpu-mine.times.json.gz"
    save_times(measured, path)
    again = load_times(path)
    assert (again.runs, again.reference_s) == (measured.runs, measured.reference_s)
    assert (again.left_out, again.seconds) == (measured.left_out, measured.seconds)
    run = set(measured.by_step())
    assert (again.held_out, again.grid) == (measured.held_out & run, measured.grid & run)


def test_the_report_can_be_made_again(measured: Measurements, tmp_path: Path) -> None:
    save_times(measured, tmp_path / "times")
    first, again = report(measured), report(load_times(tmp_path / "times"))
    assert first.is_normalised
    assert again.is_normalised
    assert again.chosen.ours.costs == first.chosen.ours.costs
    assert again.chosen.mape == first.chosen.mape
    assert again.chosen.noise_floor == first.chosen.noise_floor


def test_times_are_whole_nanoseconds(measured: Measurements) -> None:
    assert all(run.seconds == round(run.seconds, 9) for run in measured.runs)


def test_a_file_of_times_is_small_and_its_bytes_repeat(measured: Measurements, tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_times(measured, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").read_bytes()[4:8] == bytes(4)  # no time of writing
    assert (tmp_path / "one").stat().st_size < 16 * len(measured.runs)


@pytest.mark.parametrize(
    "change",
    [{"runs": [(99_999, 1.0, 1)]}, {"held_out": [99_999]}, {"reference_s": [0.0]}, {"runs": [(0, -1.0, 1)]}],
)
def test_times_that_cannot_be_are_refused(measured: Measurements, tmp_path: Path, change: dict[str, object]) -> None:
    plain = msgspec.to_builtins(CalibrationTimes.of(replace(measured))) | change
    path = tmp_path / "times"
    path.write_bytes(gzip.compress(msgspec.json.encode(plain)))
    with pytest.raises(ValueError, match="does not hold the times of a calibration"):
        load_times(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        gzip.compress(b"{}", mtime=0),
        gzip.compress(b"{}", mtime=0)[:-4],
        gzip.compress(b"{}", mtime=0)[:10] + b"zz",
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "times"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not hold the times of a calibration"):
        load_times(path)
