"""Reads a trace file in one pass and keeps only the requested window, so that a million rows need little memory.

Every change to a trace that was not requested (rows sorted or skipped) is logged.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from neaptide.loadgen.workloads.trace_formats import KNOWN, TraceEntry, TraceFormat, format_of
from neaptide.loadgen.workloads.trace_rows import Row, trace_rows

log = logging.getLogger(__name__)

Window = tuple[float, float]
WHOLE: Window = (0.0, math.inf)
MOST_PER_S = 100
"""Requests a second above which stamps in milliseconds are unlikely."""
TICK_SLACK = 1.0
"""Recorded ticks deviate by up to 1 ms."""


@dataclass(slots=True, frozen=True)
class Kept:
    """A row inside the window."""

    arrival_s: float
    """Seconds from the start of the trace."""
    number: int
    """Number of the row among all rows, from 0."""
    entry: TraceEntry


@dataclass(slots=True)
class TraceFile:
    """The content of a file."""

    format: TraceFormat
    rows: list[Kept]
    """Sorted by arrival."""
    num_rows: int
    """Number of rows in the file."""
    last_s: float
    """Arrival of the last request in the file, whatever the window."""


def read_trace(path: Path, window_s: Window = WHOLE, *, needs_arrivals: bool = True) -> TraceFile:
    """The requests of a file with A <= arrival < B.

    Every row is checked, also outside the window. Raises ValueError for a file of unknown format, an invalid row, and a
    file without arrivals if they are needed.
    """
    reading = _pass(path, window_s, None)
    if reading.format.from_first and reading.first < reading.start:
        reading = _pass(path, window_s, reading.first)
    if needs_arrivals and not reading.format.has_arrivals:
        raise ValueError(
            f"{path.name} has lengths but no arrival times: give it as offline work, or {reading.format.advice}"
        )
    _say(path.name, reading, sorts=needs_arrivals)
    if needs_arrivals and reading.format.may_be_seconds:
        _say_unit(path.name, reading)
    return TraceFile(reading.format, reading.cut(window_s), reading.num_rows, reading.last_s)


@dataclass(slots=True)
class _Reading:
    format: TraceFormat
    start: float = 0.0
    """The stamp that counts as 0."""
    first: float = math.inf
    last: float = -math.inf
    num_rows: int = 0
    num_late: int = 0
    """Rows after a row with a later stamp."""
    dropped: Counter[str] = field(default_factory=Counter)
    near: list[tuple[int, TraceEntry]] = field(default_factory=list)
    """Rows that may be in the window, with their numbers: whole ticks, if the format has them."""
    is_fractional: bool = False
    """Whether a stamp is no whole number."""
    off_tick: float = 0.0
    """Largest distance of a stamp from a tick."""

    @property
    def last_s(self) -> float:
        return (self.last - self.start) / self.format.stamps_per_s if self.last >= self.first else 0.0

    def cut(self, window_s: Window) -> list[Kept]:
        kept = [
            Kept(arrival_s, number, entry)
            for (number, entry), arrival_s in zip(self.near, self._arrivals_s(), strict=True)
            if window_s[0] <= arrival_s < window_s[1]
        ]
        kept.sort(key=lambda row: row.arrival_s)
        return kept

    def _arrivals_s(self) -> Iterator[float]:
        """Arrivals of the rows in ``near``. If all stamps are ticks, a tick's requests are spread evenly over it, in
        order."""
        tick, per_s = self.format.tick, self.format.stamps_per_s
        if tick is None or self.off_tick > TICK_SLACK:
            yield from ((entry.stamp - self.start) / per_s for _, entry in self.near)
            return
        counts = Counter(round(entry.stamp / tick) for _, entry in self.near)
        first, places = round(self.first / tick), Counter[int]()
        for _, entry in self.near:
            number = round(entry.stamp / tick)
            yield (number - first + places[number] / counts[number]) * (tick / per_s)
            places[number] += 1


def _pass(path: Path, window_s: Window, start: float | None) -> _Reading:
    """Reads the file. ``start`` is the stamp that counts as 0; None uses the first row's."""
    rows = trace_rows(path)
    row = next(rows, None)
    if row is None:
        raise ValueError(f"{path.name} has no requests")
    form = format_of(row)
    if form is None:
        raise ValueError(
            f"{path.name} has an unknown format, with the columns {', '.join(sorted(row.columns))}; known formats: "
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
    reading.is_fractional |= not stamp.is_integer()
    reading.first, reading.last = min(reading.first, stamp), max(reading.last, stamp)
    slack = 0.0
    if form.tick:
        reading.off_tick = max(reading.off_tick, abs(stamp - round(stamp / form.tick) * form.tick))
        slack = form.tick + 2 * TICK_SLACK
    low, high = (reading.start + edge * form.stamps_per_s for edge in window_s)
    if low - slack <= stamp < high + slack:
        reading.near.append((number, entry))


def _say(file: str, reading: _Reading, *, sorts: bool) -> None:
    if sorts and reading.num_late and reading.format.in_order:
        log.warning(
            "%s: %d of %d rows come after a later one: sorted by arrival", file, reading.num_late, reading.num_rows
        )
    if reading.dropped:
        log.warning("%s: of %d rows, these are skipped: %s", file, reading.num_rows, _counts(reading.dropped))


def _say_unit(file: str, reading: _Reading) -> None:
    """Names both readings of stamps that would be an unlikely load in milliseconds."""
    count = reading.num_rows - reading.dropped.total()
    if count > 1 and (reading.is_fractional or count > MOST_PER_S * reading.last_s):
        log.warning(
            "%s: timestamp is read in milliseconds, so %d requests come in %.3g s; if it is in seconds (%.3g s), call "
            "that column arrival_s, input_tokens and output_tokens the lengths",
            file,
            count,
            reading.last_s,
            reading.last_s * reading.format.stamps_per_s,
        )


def _counts(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())
