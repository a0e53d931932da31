"""The record of another server: a header, then one line for each poll with the series that have changed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from neaptide.observation.exposition import CREATED, GAUGES, Scrape, Values

KIND = "neaptide-observe"


class RecordError(Exception):
    """A file that is no record, or one with too little in it. The message is one line."""


class Header(msgspec.Struct, kw_only=True):
    """The first line of a record."""

    record: str = KIND
    version: int = 1
    server: str
    """The server's address, without user, password and query."""
    started: float
    """Unix time of the first poll."""
    every_s: float
    labels: dict[str, str] = {}


class PollLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One poll. A series that is not named has the value of the poll before."""

    at_s: float
    """Seconds since the first poll."""
    values: Values = {}
    error: str | None = None
    """Why the poll failed."""


class RecordWriter:
    """Writes a record line by line, so that a killed run leaves all polls before its end."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._last: Values = {}
        self._write(header)

    def add(self, at_s: float, scrape: Scrape) -> None:
        """Writes one poll. Raises OSError."""
        gone = {key: 0.0 for key in self._last if key not in scrape.values}
        now = scrape.values | gone
        self._write(PollLine(at_s=at_s, values={k: v for k, v in now.items() if self._last.get(k, 0.0) != v}))
        self._last = now

    def fail(self, at_s: float, error: str) -> None:
        """Writes a poll that failed. Raises OSError."""
        self._write(PollLine(at_s=at_s, error=error))

    def _write(self, line: Header | PollLine) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()


@dataclass(slots=True, frozen=True)
class PollInterval:
    """Changes between two polls."""

    start_s: float
    end_s: float
    rises: Values
    """Rises of counters and of the parts of histograms; a server that restarted began at zero."""
    before: Values
    after: Values
    """Values of the gauges at both ends."""
    restarted: bool = False

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def count(self, histogram: str) -> float:
        """Observations of a histogram."""
        return self.rises.get(f"{histogram}_count", 0.0)

    def sum(self, histogram: str) -> float:
        """Sum of a histogram's observations."""
        return self.rises.get(f"{histogram}_sum", 0.0)

    def rise(self, counter: str) -> float:
        return self.rises.get(counter, 0.0)

    def gauge(self, name: str) -> float:
        """Mean of a gauge's values at both ends."""
        return 0.5 * (self.before.get(name, 0.0) + self.after.get(name, 0.0))

    def buckets(self, histogram: str) -> list[tuple[float, float]]:
        """Upper limits of the buckets, each with the observations in it alone."""
        return buckets_of(self.rises, histogram)


@dataclass(slots=True, frozen=True)
class ServerRecord:
    """A record that has been read."""

    header: Header
    intervals: Sequence[PollInterval]
    failures: int
    """Polls that failed."""

    @property
    def seconds(self) -> float:
        return self.intervals[-1].end_s - self.intervals[0].start_s if self.intervals else 0.0

    def totals(self) -> Values:
        """Rises of all counters over the whole record."""
        sums: Values = {}
        for interval in self.intervals:
            for key, value in interval.rises.items():
                sums[key] = sums.get(key, 0.0) + value
        return sums


def buckets_of(values: Values, histogram: str) -> list[tuple[float, float]]:
    """Upper limits of a histogram's buckets, each with the observations in it alone."""
    head = f"{histogram}_bucket|"
    cumulative = sorted((float(key.removeprefix(head)), value) for key, value in values.items() if key.startswith(head))
    alone, below = [], 0.0
    for limit, count in cumulative:
        alone.append((limit, max(count - below, 0.0)))
        below = max(count, below)
    return alone


def is_record(path: Path) -> bool:
    """Whether a file's first line is a record's header. Raises OSError."""
    with path.open("rb") as file:
        line = file.readline(4096)
    return KIND.encode() in line and line.startswith(b"{")


def read_record(path: Path) -> ServerRecord:
    """Reads a record like ``decode_record``. Raises OSError too."""
    return decode_record(path.read_bytes(), path.name)


def decode_record(content: bytes, name: str) -> ServerRecord:
    """The record of a file's content. An incomplete last line is left out.

    Raises:
        RecordError: the file is no record, or a line is damaged.
    """
    lines = content.split(b"\n")
    try:
        header = msgspec.json.decode(lines[0], type=Header)
        if header.record != KIND or header.version != 1:
            raise msgspec.ValidationError(f"version {header.version} of {header.record!r}")
    except msgspec.MsgspecError as error:
        raise RecordError(f"{name} is no record of neaptide observe: {error}") from None
    polls = []
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        try:
            polls.append(msgspec.json.decode(line, type=PollLine))
        except msgspec.MsgspecError as error:
            if number == len(lines):
                break
            raise RecordError(f"{name}, line {number}: {error}") from None
    intervals = list(_intervals(polls, name))
    return ServerRecord(header, intervals, sum(poll.error is not None for poll in polls))


def _intervals(polls: Sequence[PollLine], name: str) -> Iterator[PollInterval]:
    """The intervals between polls that succeeded."""
    last_s: float | None = None
    now: Values = {}
    for poll in polls:
        if poll.error is not None:
            continue
        before, now = now, now | poll.values
        if last_s is not None:
            if poll.at_s <= last_s:
                raise RecordError(f"{name}: the polls are not in order at {poll.at_s:g} s")
            yield _between(last_s, poll.at_s, before, now)
        last_s = poll.at_s


def _between(start_s: float, end_s: float, before: Values, after: Values) -> PollInterval:
    """An interval. A counter that fell, or counts since another time, mean a restart: all counters began at zero."""
    counted = [key for key in after if key not in GAUGES and key != CREATED]
    restarted = any(after[key] < before.get(key, 0.0) for key in counted)
    restarted = restarted or (CREATED in before and after.get(CREATED) != before[CREATED])
    base: Values = {} if restarted else before
    rises = {key: rise for key in counted if (rise := after[key] - base.get(key, 0.0)) > 0.0}
    gauges = [{key: values[key] for key in GAUGES if key in values} for values in (before, after)]
    return PollInterval(start_s, end_s, rises, {} if restarted else gauges[0], gauges[1], restarted)
