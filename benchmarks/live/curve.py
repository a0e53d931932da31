"""Points of offline throughput over online latency, our curve through them, and the rivals above it.

A point is better if it is higher (offline tokens per second) or further left (latency of online requests). Our curve
connects our points at each target. It begins at online work alone, where there is no offline work. At each latency it
is the best result of any target up to it: linear between two measured points, and constant after the last one.

A rival beyond the last point is compared with an extra point of ours whose target is the rival's own latency. A rival
that answers no chats is compared with offline work alone, since a server that need not answer could refuse them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from benchmarks.live.latency import percentile_of_all, tpots_s, ttfts_s
from benchmarks.live.plan import Targets, Window
from neaptide.loadgen.client.recorder import attainment

LATENCIES = ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "ttft_p99_ms")
AS_SLOW = "as slow as rivals"
"""Name of our point at the target that matches the slowest rival."""


@dataclass(slots=True, frozen=True)
class Point:
    """One engine in one configuration at one load. A latency is infinite if too few requests ended."""

    name: str
    offline_tokens_per_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    attainment: float
    """Fraction of requests that met the run's targets."""
    over_alone: float | None = None
    """The TPOT target in TPOT p50s of online work alone; None for points not on our curve."""

    @classmethod
    def from_json(cls, shown: Mapping[str, Any]) -> "Point":
        """Restores the result of ``to_json``, as precisely as it was written."""
        known: dict[str, Any] = {name: math.inf for name in LATENCIES if shown[name] is None}
        return cls(**(dict(shown) | known))

    @property
    def is_rival(self) -> bool:
        return self.over_alone is None

    def to_json(self) -> dict[str, Any]:
        """As JSON, with None for infinity."""
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in shown.items()}


def point_of(name: str, window: Window, targets: Targets, over_alone: float | None = None) -> Point:
    latencies_s = tpots_s(window.records), ttfts_s(window.records)
    return Point(
        name,
        window.offline_tokens_per_s,
        *(1e3 * percentile_of_all(values_s, q) for values_s in latencies_s for q in (0.5, 0.99)),
        attainment=attainment(window.records, targets.ttft_s, targets.tpot_s),
        over_alone=over_alone,
    )


def mean_point(points: Sequence[Point]) -> Point:
    """Mean of repeats of one configuration."""
    numbers = [f.name for f in fields(Point) if f.name not in ("name", "over_alone")]
    return replace(points[0], **{n: sum(getattr(p, n) for p in points) / len(points) for n in numbers})


def mean_points(repeats: Sequence[Sequence[Point]]) -> list[Point]:
    by_name: dict[str, list[Point]] = {}
    for points in repeats:
        for point in points:
            by_name.setdefault(point.name, []).append(point)
    return [mean_point(points) for points in by_name.values()]


@dataclass(slots=True, frozen=True)
class Curve:
    """The most offline work that we did up to a latency, by one latency measure."""

    latencies_ms: tuple[float, ...]
    """Ascending; the first is that of online work alone."""
    tokens_per_s: tuple[float, ...]
    """Never decreasing, since a user who accepts more latency can still choose the tighter target."""

    @classmethod
    def through(cls, ours: Sequence[Point], alone: Point, latency: str) -> "Curve":
        points = [(getattr(alone, latency), 0.0)]
        points += [(getattr(p, latency), p.offline_tokens_per_s) for p in ours if math.isfinite(getattr(p, latency))]
        points.sort()
        return cls(tuple(x for x, _ in points), tuple(np.maximum.accumulate([y for _, y in points]).tolist()))

    def at(self, latency_ms: float, ceiling_tokens_per_s: float = 0.0) -> float:
        """Offline tokens per second; 0 below the latency of online work alone, which we never beat.

        Args:
            ceiling_tokens_per_s: rate of offline work alone, for rivals whose chats never end.
        """
        if math.isinf(latency_ms):
            return max(self.tokens_per_s[-1], ceiling_tokens_per_s)
        return float(np.interp(latency_ms, self.latencies_ms, self.tokens_per_s, left=0.0))


def slower_than_ours_ms(ours: Sequence[Point], rivals: Sequence[Point]) -> float | None:
    """TPOT p50 of the slowest rival that answers chats at all; None if our curve extends that far."""
    theirs_ms = [rival.tpot_p50_ms for rival in rivals if math.isfinite(rival.tpot_p50_ms)]
    slowest_ms = max(theirs_ms, default=0.0)
    return slowest_ms if slowest_ms > max(point.tpot_p50_ms for point in ours) else None


def standing(
    ours: Sequence[Point], rivals: Sequence[Point], alone: Point, ceiling_tokens_per_s: float | None = None
) -> dict[str, dict[str, Any]]:
    """For each rival and latency measure: our curve at the rival's latency, and whether the rival is above it.

    Args:
        ceiling_tokens_per_s: rate of offline work alone, if measured.
    """
    curves = {latency: Curve.through(ours, alone, latency) for latency in LATENCIES}
    found: dict[str, dict[str, Any]] = {}
    for rival in rivals:
        found[rival.name] = {}
        for latency, curve in curves.items():
            at_same = curve.at(getattr(rival, latency), ceiling_tokens_per_s or 0.0)
            found[rival.name][latency] = {
                "curve_tokens_per_s": round(at_same, 1),
                "rival_tokens_per_s": round(rival.offline_tokens_per_s, 1),
                "is_above": rival.offline_tokens_per_s > at_same,
            }
    return found


def rival_ratios(headline: Point, rivals: Sequence[Point]) -> Mapping[str, float | None]:
    """Our values over the rivals' at the headline's target. TTFT p99 is compared with the rival that has the lowest;
    offline work with the best rival at an equal or better TPOT p50. None without such a rival."""
    ttfts_ms = [rival.ttft_p99_ms for rival in rivals if math.isfinite(rival.ttft_p99_ms)]
    as_good = [r.offline_tokens_per_s for r in rivals if r.tpot_p50_ms <= headline.tpot_p50_ms]
    best = max(as_good, default=0.0)
    return {
        "ttft_p99_vs_rival": round(headline.ttft_p99_ms / min(ttfts_ms), 4) if ttfts_ms else None,
        "offline_vs_rival": round(headline.offline_tokens_per_s / best, 4) if best > 0.0 else None,
    }
