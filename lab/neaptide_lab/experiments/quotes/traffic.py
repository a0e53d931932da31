"""Two weeks of chats: arrivals along a day's curve or along recorded rates, with drawn lengths."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from neaptide.durations import DAY_S
from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.messages import EngineReady
from neaptide.loadgen.workloads.online_sets import (
    CURVE_BIN_S,
    RATE_WINDOW_S,
    echo_day_curve,
    poisson_arrivals,
    servegen_day_curve,
)
from neaptide.loadgen.workloads.traces import TraceRequest, content_base, data_file, load_lengths, read_csv
from neaptide.server.quotes.periods import PERIOD_S, Period, length_bucket

BIN_S = 60
"""Loads that follow are told by the minute. A server's record has them by ``PERIOD_S``."""
DAY_BINS, PERIOD_BINS = DAY_S // BIN_S, PERIOD_S // BIN_S
NUM_DAYS = 14
CHATS, CONVERSATIONS = ("offline", "sharegpt_lengths.csv.gz"), ("online", "azure_conv_2023.csv.gz")
Lengths = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class TrafficKind:
    """A kind of traffic."""

    name: str
    lengths: tuple[str, str]
    """Bundled file whose prompts and answers are drawn."""


KINDS = (
    TrafficKind("servegen-day-large", CHATS),
    TrafficKind("servegen-day-small", CHATS),
    TrafficKind("echo-day", CHATS),
    TrafficKind("servegen_rate_m_large", CONVERSATIONS),
    TrafficKind("servegen_rate_m_small", CONVERSATIONS),
)


def relative_rates(name: str) -> tuple[FloatArray, int]:
    """Request rates of every bin with mean 1, of all days, and the bin in seconds. A day's curve is repeated."""
    if name == "echo-day":
        return np.tile(echo_day_curve(), NUM_DAYS), CURVE_BIN_S
    if name.startswith("servegen-day-"):
        return np.tile(servegen_day_curve(name.removeprefix("servegen-day-")), NUM_DAYS), RATE_WINDOW_S
    rows = read_csv(data_file("online", f"{name}.csv.gz"))
    rates = np.array([float(row["requests_per_s"]) for row in rows])
    return rates / rates.mean(), RATE_WINDOW_S


def length_pairs(file: tuple[str, str]) -> Lengths:
    """[requests, 2] tokens of prompt and answer."""
    rows = load_lengths(data_file(*file), 0)
    return np.array([(row.input_tokens, row.output_tokens) for row in rows], np.int64)


@dataclass(slots=True)
class ChatTraffic:
    """Chats of several days. Equal seeds give equal days.

    Args:
        mean_load: share of the device that the chats take on average.
    """

    kind: TrafficKind
    info: EngineReady
    mean_load: float
    seed: int
    num_days: int = 0
    _rates_rps: FloatArray = field(default_factory=lambda: np.zeros(0))
    _bin_s: int = 0
    _lengths: Lengths = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    _sums: FloatArray = field(default_factory=lambda: np.zeros((0, 2)))
    """[minutes, 2] tokens, and tokens of KV that decodes read."""
    _last_day: tuple[int, FloatArray, IntArray] | None = None
    """The day that was drawn last; a day takes a tenth of a second."""

    def __post_init__(self) -> None:
        relative, self._bin_s = relative_rates(self.kind.name)
        self._lengths = length_pairs(self.kind.lengths)
        mean_s = float((self._counts(self._lengths) @ self._costs).mean())
        self._rates_rps = relative * (self.mean_load / mean_s)
        self.num_days = len(relative) * self._bin_s // DAY_S
        self._sums = np.concatenate([self._minute_sums(*self._day(day)) for day in range(self.num_days)])

    @property
    def end_s(self) -> int:
        return self.num_days * DAY_S

    @property
    def _costs(self) -> FloatArray:
        return np.array([self.info.token_s, self.info.kv_token_s])

    @staticmethod
    def _counts(lengths: Lengths) -> FloatArray:
        """[requests, 2] tokens of a chat, and of KV that its decodes read."""
        prompt, answer = lengths[:, 0].astype(np.float64), lengths[:, 1].astype(np.float64)
        return np.stack((prompt + answer, answer * (prompt + answer / 2)), axis=1)

    def _day(self, day: int) -> tuple[FloatArray, IntArray]:
        """Arrivals within the day, in seconds, and the row of each one's lengths."""
        if self._last_day is not None and self._last_day[0] == day:
            return self._last_day[1:]
        rng = np.random.default_rng([content_base(self.kind.name) >> 31, self.seed, day])
        bins = DAY_S // self._bin_s
        arrivals = np.array(poisson_arrivals(rng, self._rates_rps[day * bins : (day + 1) * bins], self._bin_s))
        rows = rng.integers(len(self._lengths), size=len(arrivals))
        self._last_day = day, arrivals, rows
        return arrivals, rows

    def _minute_sums(self, arrivals_s: FloatArray, rows: IntArray) -> FloatArray:
        """[minutes, 2] sums of one day's chats, each counted where it arrives."""
        counts, place = self._counts(self._lengths[rows]), (arrivals_s // BIN_S).astype(np.int64)
        columns = [np.bincount(place, weights=counts[:, k], minlength=DAY_BINS) for k in range(2)]
        return np.stack(columns, axis=1)

    def record(self, now_s: float) -> list[Period]:
        """Record of a server until then, the unfinished period included."""
        current = int(now_s) // PERIOD_S
        whole = self._sums[: current * PERIOD_BINS].reshape(-1, PERIOD_BINS, 2).sum(axis=1)
        periods = [_period(k * PERIOD_S, PERIOD_S, sums) for k, sums in enumerate(whole)]
        if now_s > current * PERIOD_S:
            minute = int(now_s) // BIN_S
            sums = self._sums[current * PERIOD_BINS : minute].sum(axis=0) + self._sums_until(now_s)
            periods.append(_period(current * PERIOD_S, now_s - current * PERIOD_S, sums))
        return periods

    def loads_from(self, now_s: float) -> tuple[FloatArray, float]:
        """Loads of the rest of the current minute and of all later ones, and the length of that rest."""
        current = int(now_s) // BIN_S
        rest_s = (current + 1) * BIN_S - now_s
        first = (self._sums[current] - self._sums_until(now_s)) @ self._costs / rest_s
        later = self._sums[current + 1 :] @ self._costs / BIN_S
        return np.concatenate(([first], later)), rest_s

    def _sums_until(self, now_s: float) -> FloatArray:
        """[2] sums of the current minute until then."""
        day, at_s = divmod(now_s, DAY_S)
        arrivals_s, rows = self._day(int(day))
        chosen = (arrivals_s >= at_s // BIN_S * BIN_S) & (arrivals_s < at_s)
        return np.asarray(self._counts(self._lengths[rows[chosen]]).sum(axis=0))

    def length_buckets(self) -> tuple[dict[int, int], dict[int, int]]:
        """Number of prompts, and of answers, by length bucket, of the lengths that are drawn from."""
        prompts, answers = (Counter(map(length_bucket, column.tolist())) for column in self._lengths.T)
        return dict(prompts), dict(answers)

    def requests(self, start_s: float, end_s: float) -> list[TraceRequest]:
        """The chats that arrive between the two times; arrivals count from the first."""
        found: list[TraceRequest] = []
        base = content_base(f"{self.kind.name} {self.seed} {start_s}")
        for day in range(int(start_s // DAY_S), int(np.ceil(end_s / DAY_S))):
            arrivals_s, rows = self._day(day)
            at_s = arrivals_s + day * DAY_S
            for k in np.flatnonzero((at_s >= start_s) & (at_s < end_s)).tolist():
                prompt, answer = self._lengths[rows[k]].tolist()
                found.append(TraceRequest(float(at_s[k] - start_s), ((base + len(found), prompt),), answer))
        return found


def _period(start_s: int, seconds: float, sums: Sequence[float] | FloatArray) -> Period:
    tokens, kv_tokens = round(float(sums[0])), round(float(sums[1]))
    return Period(start_s=start_s, seconds=float(seconds), online_tokens=tokens, online_kv_tokens=kv_tokens)
