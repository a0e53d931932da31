"""Points of offline throughput against online latency, our curve through them, and which rivals stand above it.

A point is better the higher (offline tokens a second) and the further left (latency of online requests) it stands. Our
curve runs through our points at each target and begins at online alone, where there is no offline work: it is the most
that targets up to a latency gave, straight between two measured points and flat behind the last. A rival beyond that is
compared with a point of ours whose target is what the rival's own streams got, and one that answers no chats with
offline work alone: whoever need not answer can turn them away.
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
"""The name of our point at the target that the slowest rival sets."""


@dataclass(slots=True, frozen=True)
class Point:
    """One engine in one configuration at one load. A latency is infinite where too few requests ended."""

    name: str
    offline_tokens_per_s: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    attainment: float
    """Of the targets of the run."""
    over_alone: float | None = None
    """The TPOT target in TPOT p50s of online alone; None for what is not on our curve."""

    @classmethod
    def from_json(cls, shown: Mapping[str, Any]) -> "Point":
        """What ``to_json`` made, as precise as it is."""
        known: dict[str, Any] = {name: math.inf for name in LATENCIES if shown[name] is None}
        return cls(**(dict(shown) | known))

    @property
    def is_rival(self) -> bool:
        return self.over_alone is None

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: None there."""
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
    """Of repeats of one configuration."""
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
    """The most offline work that we did at a latency, by one latency measure."""

    latencies_ms: tuple[float, ...]
    """Ascending; the first is that of online alone."""
    tokens_per_s: tuple[float, ...]
    """Never falling: whoever accepts more latency may still take the target before."""

    @classmethod
    def through(cls, ours: Sequence[Point], alone: Point, latency: str) -> "Curve":
        points = [(getattr(alone, latency), 0.0)]
        points += [(getattr(p, latency), p.offline_tokens_per_s) for p in ours if math.isfinite(getattr(p, latency))]
        points.sort()
        return cls(tuple(x for x, _ in points), tuple(np.maximum.accumulate([y for _, y in points]).tolist()))

    def at(self, latency_ms: float, ceiling_tokens_per_s: float = 0.0) -> float:
        """Offline tokens a second; 0 left of online alone, whose latency nothing of ours beats.

        Args:
            ceiling_tokens_per_s: of offline work alone, for those whose chats never end.
        """
        if math.isinf(latency_ms):
            return max(self.tokens_per_s[-1], ceiling_tokens_per_s)
        return float(np.interp(latency_ms, self.latencies_ms, self.tokens_per_s, left=0.0))


def slower_than_ours_ms(ours: Sequence[Point], rivals: Sequence[Point]) -> float | None:
    """The TPOT p50 of the slowest rival that answers chats at all; None if our curve reaches as far."""
    theirs_ms = [rival.tpot_p50_ms for rival in rivals if math.isfinite(rival.tpot_p50_ms)]
    slowest_ms = max(theirs_ms, default=0.0)
    return slowest_ms if slowest_ms > max(point.tpot_p50_ms for point in ours) else None


def standing(
    ours: Sequence[Point], rivals: Sequence[Point], alone: Point, ceiling_tokens_per_s: float | None = None
) -> dict[str, dict[str, Any]]:
    """Rival -> by each latency, what our curve does at the rival's, and whether the rival stands above it.

    Args:
        ceiling_tokens_per_s: of offline work alone, if it was measured.
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
    """Ours over theirs, at the headline's target: TTFT p99 against the rival with the lowest; offline work against the
    most that a rival did at an equal or better TPOT p50. None where there is none to compare with."""
    ttfts_ms = [rival.ttft_p99_ms for rival in rivals if math.isfinite(rival.ttft_p99_ms)]
    as_good = [r.offline_tokens_per_s for r in rivals if r.tpot_p50_ms <= headline.tpot_p50_ms]
    best = max(as_good, default=0.0)
    return {
        "ttft_p99_vs_rival": round(headline.ttft_p99_ms / min(ttfts_ms), 4) if ttfts_ms else None,
        "offline_vs_rival": round(headline.offline_tokens_per_s / best, 4) if best > 0.0 else None,
    }
