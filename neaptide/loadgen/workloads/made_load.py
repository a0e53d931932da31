"""Synthetic online load: an arrival process, a length distribution, and shared prefixes."""

import itertools
import logging
import math
import re
from dataclasses import dataclass

import numpy as np

from neaptide.loadgen.workloads.lengths import lognormal_lengths, uniform_lengths
from neaptide.loadgen.workloads.online_sets import echo_day_curve, poisson_arrivals
from neaptide.loadgen.workloads.traces import TraceRequest, content_base

log = logging.getLogger(__name__)

SHAPES = ("poisson", "gamma", "on-off", "diurnal")
FAR_OFF = 0.2
"""Relative deviation of the number of requests from its mean that causes a warning."""


@dataclass(slots=True, frozen=True)
class Arrivals:
    """The arrival process; the rate is its mean."""

    rate_rps: float
    duration_s: float
    shape: str = "poisson"
    cv: float = 3.0
    """gamma: standard deviation of the gaps over their mean; 1 is Poisson."""
    on_s: float = 10.0
    off_s: float = 20.0
    """on-off: lengths of the periods with and without requests."""

    @property
    def mean_requests(self) -> float:
        return self.rate_rps * self.duration_s

    def check(self) -> None:
        """Raises ValueError with one line."""
        for name, value in (("--rate", self.rate_rps), ("--duration", self.duration_s), ("--cv", self.cv)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive")
        if not (0 < self.on_s < math.inf and 0 <= self.off_s < math.inf):
            raise ValueError("--on-s must be positive, and --off-s at least 0")

    def draw(self, rng: np.random.Generator) -> list[float]:
        """Arrival times, sorted, in [0, duration)."""
        if self.shape == "gamma":
            return self._gamma(rng)
        if self.shape == "diurnal":
            curve = echo_day_curve()
            arrivals = poisson_arrivals(rng, self.rate_rps * curve, self.duration_s / len(curve))
        elif self.shape == "on-off":
            arrivals = self._on_off(rng)
        else:
            arrivals = poisson_arrivals(rng, np.array([self.rate_rps]), self.duration_s)
        return arrivals

    def _gamma(self, rng: np.random.Generator) -> list[float]:
        form = 1 / self.cv**2
        gaps = rng.gamma(form, 1 / (self.rate_rps * form), max(16, int(4 * self.rate_rps * self.duration_s)))
        times = np.cumsum(gaps)
        while times[-1] < self.duration_s:
            more = rng.gamma(form, 1 / (self.rate_rps * form), len(gaps))
            times = np.concatenate([times, times[-1] + np.cumsum(more)])
        arrivals: list[float] = times[times < self.duration_s].tolist()
        return arrivals

    def _on_off(self, rng: np.random.Generator) -> list[float]:
        """Poisson arrivals in the on periods, at a rate that gives the mean over a whole cycle."""
        cycle_s = self.on_s + self.off_s
        cycles = math.ceil(self.duration_s / cycle_s)
        busy = poisson_arrivals(rng, np.array([self.rate_rps * cycle_s / self.on_s]), cycles * self.on_s)
        arrivals = (on_s + on_s // self.on_s * self.off_s for on_s in busy)
        return [arrival_s for arrival_s in arrivals if arrival_s < self.duration_s]


@dataclass(slots=True, frozen=True)
class Lengths:
    """Token counts of prompts or answers."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """``128``, ``uniform:64:256`` or ``lognormal:MEAN:DEVIATION``. Raises ValueError."""
        if re.fullmatch(r"[1-9]\d*", text):
            return cls("fixed", int(text))
        match = re.fullmatch(r"(uniform|lognormal):(\d+\.?\d*):(\d+\.?\d*)", text)
        if match is None or float(match[2]) < 1 or (match[1] == "uniform" and float(match[3]) < float(match[2])):
            raise ValueError(f"lengths are N, uniform:LOW:HIGH or lognormal:MEAN:DEVIATION in tokens, not {text!r}")
        return cls(match[1], float(match[2]), float(match[3]))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.kind == "fixed":
            return [int(self.first)] * count
        if self.kind == "uniform":
            drawn = uniform_lengths(rng, count, int(self.first), int(self.second))
        else:
            drawn = lognormal_lengths(rng, count, self.first, self.second)
        lengths: list[int] = drawn.tolist()
        return lengths


@dataclass(slots=True, frozen=True)
class PrefixSharing:
    """Prompts begin with one of ``prefixes`` prefixes of ``tokens`` tokens each."""

    prefixes: int = 0
    tokens: int = 0


def made_load(
    arrivals: Arrivals, inputs: Lengths, outputs: Lengths, seed: int, sharing: PrefixSharing = PrefixSharing()
) -> list[TraceRequest]:
    """The requests of a synthetic load.

    Another seed or setting gives other prompts, including prefixes: otherwise a server could answer from the cache of
    an earlier run. Raises ValueError for invalid numbers.
    """
    arrivals.check()
    rng = np.random.default_rng([content_base("made") >> 31, seed])
    times = arrivals.draw(rng)
    if not times:
        raise ValueError("no request arrives in this time at this rate: raise --rate or --duration")
    if abs(len(times) - arrivals.mean_requests) > FAR_OFF * arrivals.mean_requests:
        log.warning(
            "this seed gives %d requests; at this rate %.0f are expected: use another --seed or a longer --duration",
            len(times),
            arrivals.mean_requests,
        )
    base = content_base(f"made {seed} {arrivals} {inputs} {outputs} {sharing}")
    ids = itertools.count(base + sharing.prefixes)
    prompts, answers = inputs.draw(rng, len(times)), outputs.draw(rng, len(times))
    heads = rng.integers(max(1, sharing.prefixes), size=len(times)).tolist()
    requests = []
    for arrival_s, prompt, answer, head in zip(times, prompts, answers, heads, strict=True):
        shared = min(sharing.tokens, prompt - 1) if sharing.prefixes else 0
        own = (next(ids), prompt - shared)
        segments = ((base + head, shared), own) if shared else (own,)
        requests.append(TraceRequest(arrival_s, segments, answer))
    return requests
