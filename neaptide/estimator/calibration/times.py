"""A calibration's raw times, in a file next to its profile, so that the profile can be recomputed.

The file is compressed JSON. Steps come first, with runs of equal requests as one entry. Then follows every timed run
with its step's number. ``report(load_times(path))`` reproduces the report.
"""

import gzip
import zlib
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec

from neaptide.estimator.calibration.calibrate import MeasuredRun, Measurements
from neaptide.estimator.calibration.micro_runs import Parts

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class CalibrationTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain data of a calibration's measurements."""

    steps: list[list[Annotated[list[Count], msgspec.Meta(min_length=3, max_length=4)]]]
    """For each step: runs of equal requests as count, tokens to compute, context tokens before them, and the length of
    a shared prefix if they have one."""
    held_out: list[Count]
    """Numbers of the held-out steps."""
    grid: list[Count]
    """Numbers of the steps that are on the grid."""
    runs: list[tuple[Count, Seconds, Count]]
    """In order: step number, seconds, index of the next run of the reference step."""
    reference_s: list[Seconds]
    left_out: dict[str, Count]
    """Reason for skipping steps -> number of steps."""
    seconds: float
    """Duration of the whole calibration."""

    @classmethod
    def of(cls, measured: Measurements) -> "CalibrationTimes":
        numbers = {parts: number for number, parts in enumerate(measured.by_step())}
        return cls(
            [[[len(list(alike)), *part] for part, alike in groupby(parts)] for parts in numbers],
            [number for parts, number in numbers.items() if parts in measured.held_out],
            [number for parts, number in numbers.items() if parts in measured.grid],
            [(numbers[run.parts], run.seconds, run.at) for run in measured.runs],
            measured.reference_s,
            dict(measured.left_out),
            measured.seconds,
        )

    def measurements(self) -> Measurements:
        """The measurements of the steps that ran; skipped steps are only counted.

        Raises:
            IndexError: a run or a list refers to a missing step.
        """
        steps: list[Parts] = [tuple(tuple(part) for count, *part in step for _ in range(count)) for step in self.steps]
        return Measurements(
            frozenset(steps[number] for number in self.held_out),
            frozenset(steps[number] for number in self.grid),
            [MeasuredRun(steps[number], seconds, at) for number, seconds, at in self.runs],
            self.reference_s,
            Counter(self.left_out),
            self.seconds,
        )


def times_path(profile: Path) -> Path:
    """Path of the times file of a profile."""
    return profile.with_suffix(".times.json.gz")


def save_times(measured: Measurements, path: Path) -> None:
    """Writes the file. Equal measurements give equal bytes."""
    path.write_bytes(gzip.compress(msgspec.json.encode(CalibrationTimes.of(measured)), mtime=0))


def load_times(path: Path) -> Measurements:
    """Reads the file.

    Raises:
        ValueError: the file has other content.
        OSError: the file cannot be read.
    """
    data = path.read_bytes()
    try:
        return msgspec.json.decode(gzip.decompress(data), type=CalibrationTimes).measurements()
    except (msgspec.MsgspecError, EOFError, gzip.BadGzipFile, zlib.error, IndexError) as error:
        raise ValueError(f"{path} does not hold the times of a calibration: {error}") from error
