"""Reads a trace file, once and while cutting: a window of a million rows does not hold the others.

Whatever is done to a trace beside what was asked for (rows sorted, rows left out) is said in the log.
"""

import logging
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from neaptide.loadgen.workloads.trace_formats import KNOWN, Entry, TraceFormat, format_of
from neaptide.loadgen.workloads.trace_rows import Row, trace_rows

log = logging.getLogger(__name__)

Window = tuple[float, float]
WHOLE: Window = (0.0, math.inf)


@dataclass(slots=True, frozen=True)
class Kept:
    """A row inside the window."""

    arrival_s: float
    """Counted from the start of the trace."""
    number: int
    """Of the row among all, from 0."""
    entry: Entry


@dataclass(slots=True)
class TraceFile:
    """What was read."""

    format: TraceFormat
    rows: list[Kept]
    """Sorted by arrival."""
    num_rows: int
    """In the file."""
    last_s: float
    """Arrival of the last request in the file, whatever the window."""


def read_trace(path: Path, window_s: Window = WHOLE, *, needs_arrivals: bool = True) -> TraceFile:
    """The requests of a file with A <= arrival < B.

    Every row is checked, also those outside the window. Raises ValueError for a file of no known format, a row that
    cannot be meant, and, if arrivals are needed, a file without them.
    """
    reading = _pass(path, window_s, None)
    if reading.format.from_first and reading.first < reading.start:
        reading = _pass(path, window_s, reading.first)
    if needs_arrivals and not reading.format.has_arrivals:
        raise ValueError(
            f"{path.name} has lengths but no arrival times: give it as offline work, or add a column arrival_s"
        )
    _say(path.name, reading)
    return TraceFile(reading.format, reading.cut(window_s), reading.num_rows, reading.last_s)


@dataclass(slots=True)
class _Reading:
    format: TraceFormat
    start: float = 0.0
    """Stamp that counts as 0."""
    first: float = math.inf
    last: float = -math.inf
    num_rows: int = 0
    num_late: int = 0
    """Rows after one with a later stamp."""
    dropped: Counter[str] = field(default_factory=Counter)
    near: list[tuple[int, int, Entry]] = field(default_factory=list)
    """Rows that may lie in the window: number of the row, number of the stamp, what it says."""
    stamps: "array[float]" = field(default_factory=lambda: array("d"))
    """Of all rows, where a format's ticks depend on them."""

    @property
    def last_s(self) -> float:
        return (self.last - self.start) / self.format.stamps_per_s if self.last >= self.first else 0.0

    def cut(self, window_s: Window) -> list[Kept]:
        spread = _spread(self.stamps, self.format) if self.format.tick else None
        kept = []
        for number, place, entry in self.near:
            if spread is None:
                arrival_s = (entry.stamp - self.start) / self.format.stamps_per_s
            else:
                arrival_s = float(spread[place])
            if window_s[0] <= arrival_s < window_s[1]:
                kept.append(Kept(arrival_s, number, entry))
        kept.sort(key=lambda row: row.arrival_s)
        return kept


def _pass(path: Path, window_s: Window, start: float | None) -> _Reading:
    """``start`` is the stamp that counts as 0; None takes the first row's for it."""
    rows = trace_rows(path)
    row = next(rows, None)
    if row is None:
        raise ValueError(f"{path.name} has no requests")
    form = format_of(row)
    if form is None:
        raise ValueError(
            f"{path.name} has no columns of a known trace format: it has {', '.join(sorted(row.columns))}; known are "
            + " | ".join(KNOWN)
        )
    reading = _Reading(form)
    if start is not None:
        reading.start = start
    elif form.from_first:
        reading.start = math.nan
    _take(reading, row, window_s)
    for row in rows:
        _take(reading, row, window_s)
    if math.isnan(reading.start):
        raise ValueError(f"{path.name} has no requests: {_counts(reading.dropped)}")
    return reading


def _take(reading: _Reading, row: Row, window_s: Window) -> None:
    number = reading.num_rows
    reading.num_rows += 1
    form, entry = reading.format, reading.format.read(row)
    if isinstance(entry, str):
        reading.dropped[entry] += 1
        return
    if math.isnan(reading.start):
        reading.start = entry.stamp
    stamp = entry.stamp
    reading.num_late += stamp < reading.last
    reading.first, reading.last = min(reading.first, stamp), max(reading.last, stamp)
    slack = form.tick or 0.0
    low, high = (reading.start + edge * form.stamps_per_s for edge in window_s)
    if low - slack <= stamp < high + slack:
        reading.near.append((number, len(reading.stamps), entry))
    if form.tick:
        reading.stamps.append(stamp)


def _spread(stamps: Sequence[float], form: TraceFormat) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Arrival seconds; where all stamps are ticks, a tick's requests are spread evenly over it in their order."""
    values = np.array(stamps)
    assert form.tick is not None
    ticks = np.rint(values / form.tick).astype(np.int64)
    first = values.min()
    if np.abs(values - ticks * form.tick).max() > 1:  # the recorded ticks are up to 1 ms off
        return np.asarray((values - first) / form.stamps_per_s)
    order = np.argsort(ticks, kind="stable")
    _, ranks, counts = np.unique(ticks[order], return_inverse=True, return_counts=True)
    place = np.arange(len(ticks)) - (np.cumsum(counts) - counts)[ranks]
    spread = np.zeros(len(ticks))
    spread[order] = (ticks[order] - ticks.min() + place / counts[ranks]) * (form.tick / form.stamps_per_s)
    return spread


def _say(file: str, reading: _Reading) -> None:
    if reading.num_late and reading.format.in_order and reading.format.has_arrivals:
        log.warning(
            "%s: %d of %d rows come after a later one: sorted by arrival", file, reading.num_late, reading.num_rows
        )
    if reading.dropped:
        log.warning("%s: of %d rows are left out: %s", file, reading.num_rows, _counts(reading.dropped))


def _counts(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())
