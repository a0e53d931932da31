"""The raw times of a calibration, kept in a file beside its profile: whatever the profile says can be worked out again.

Compressed JSON. Steps come first, requests that are alike and stand together as one entry; then every timed run by
the number of its step. ``report(load_times(path))`` is the report of the calibration.
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
    """What a calibration measured, as plain data."""

    steps: list[list[tuple[Count, Count, Count]]]
    """For each step: requests that are alike, the tokens of each to compute, the context tokens before them."""
    held_out: list[Count]
    """Numbers of the steps that judge the models ..."""
    grid: list[Count]
    """... and of those that are not ragged."""
    runs: list[tuple[Count, Seconds, Count]]
    """In order: number of the step, seconds, index of the next run of the reference step."""
    reference_s: list[Seconds]
    left_out: dict[str, Count]
    """Why steps were left out -> how many."""
    seconds: float
    """What all of it took."""

    @classmethod
    def of(cls, measured: Measurements) -> "CalibrationTimes":
        numbers = {parts: number for number, parts in enumerate(measured.by_step())}
        return cls(
            [[(len(list(alike)), *part) for part, alike in groupby(parts)] for parts in numbers],
            [number for parts, number in numbers.items() if parts in measured.held_out],
            [number for parts, number in numbers.items() if parts in measured.grid],
            [(numbers[run.parts], run.seconds, run.at) for run in measured.runs],
            measured.reference_s,
            dict(measured.left_out),
            measured.seconds,
        )

    def measurements(self) -> Measurements:
        """Of the steps that ran; what was left out is only counted.

        Raises:
            IndexError: a run or a kind names a step that is not there.
        """
        steps: list[Parts] = [
            tuple((tokens, context) for count, tokens, context in step for _ in range(count)) for step in self.steps
        ]
        return Measurements(
            frozenset(steps[number] for number in self.held_out),
            frozenset(steps[number] for number in self.grid),
            [MeasuredRun(steps[number], seconds, at) for number, seconds, at in self.runs],
            self.reference_s,
            Counter(self.left_out),
            self.seconds,
        )


def times_path(profile: Path) -> Path:
    """Where the times of a profile's calibration are kept."""
    return profile.with_suffix(".times.json.gz")


def save_times(measured: Measurements, path: Path) -> None:
    """The same measurements give the same bytes."""
    path.write_bytes(gzip.compress(msgspec.json.encode(CalibrationTimes.of(measured)), mtime=0))


def load_times(path: Path) -> Measurements:
    """
    Raises:
        ValueError: the file holds something else.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    try:
        return msgspec.json.decode(gzip.decompress(data), type=CalibrationTimes).measurements()
    except (msgspec.MsgspecError, EOFError, gzip.BadGzipFile, zlib.error, IndexError) as error:
        raise ValueError(f"{path} does not hold the times of a calibration: {error}") from error
