"""The measurements of the live experiment so far, and its figures, which also exist if it is cut short."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.live.curve import Point, mean_points, point_of, rival_ratios, standing
from benchmarks.live.latency import ttft_p99_ratio
from benchmarks.live.plan import TPOT_OVER_ALONE, Case, Targets, Window
from benchmarks.live.tables import summary
from neaptide.loadgen.client.recorder import attainment

ALONE, CAPPED, CEILING, BOTH = "online alone", "offline, capped", "offline", "both"
"""Names of the headline's runs; other runs are named by `curve_name` or by their rival."""
RATIOS = (
    "share",
    "share_uncapped",
    "attainment_minus_alone",
    "ttft_p99_vs_alone",
    "ttft_p99_vs_rival",
    "offline_vs_rival",
)


@dataclass(slots=True)
class CaseFindings:
    """The runs at one load on one engine, as they end."""

    case: Case
    engine: str
    rate_rps: float
    targets: Targets
    """The headline's targets."""
    windows: dict[str, Window]
    """Windows by run."""
    points: list[Point] = field(default_factory=list)
    """Points of our curve, without the headline."""
    rivals: list[Point] = field(default_factory=list)
    prediction: dict[str, Any] | None = None
    """The simulator's result for the headline's run."""

    @property
    def headline(self) -> Point | None:
        both = self.windows.get(BOTH)
        if both is None:
            return None
        return point_of(curve_name(TPOT_OVER_ALONE), both, self.targets, TPOT_OVER_ALONE)

    @property
    def ours(self) -> list[Point]:
        """Measured points of our curve, by target."""
        headline = self.headline
        points = self.points if headline is None else [*self.points, headline]
        return sorted(points, key=lambda point: point.over_alone or 0.0)

    def to_figures(self, *, has_curve: bool) -> dict[str, Any]:
        """Figures of the runs. Ratios without a needed run are None; without a curve there are no points."""
        windows, targets = self.windows, self.targets
        found: dict[str, Any] = {
            "load": self.case.load,
            "ratios": ratios_of(windows, targets),
            "rate_rps": round(self.rate_rps, 3),
            "targets_ms": {"ttft": round(1e3 * targets.ttft_s, 1), "tpot": round(1e3 * targets.tpot_s, 1)},
        }
        if CAPPED in windows:
            # A ceiling measured with shorter steps flatters `share`; with longer ones it is not limited.
            found["capped_step_over_cap"] = round(windows[CAPPED].mean_step_ms / (1e3 * targets.tpot_s), 3)
        if has_curve:
            found |= {"engine": self.engine, "arrivals": self.case.shape}
            if (headline := self.headline) is not None:
                found["ratios"] |= rival_ratios(headline, self.rivals)
            if ALONE in windows:
                found["alone"] = point_of(ALONE, windows[ALONE], targets)
            found["points"] = [*self.ours, *self.rivals]
        found["runs"] = [summary(name, window, targets.ttft_s, targets.tpot_s) for name, window in windows.items()]
        return found | ({"prediction": self.prediction} if self.prediction else {})


@dataclass(slots=True)
class Findings:
    """Measurements of the whole experiment so far."""

    window_s: tuple[float, float]
    has_curve: bool
    checked_tokens: int = 0
    ceilings: dict[str, Window] = field(default_factory=dict)
    """Offline work alone without a limit on steps, by engine."""
    cases: list[CaseFindings] = field(default_factory=list)
    """Those of the headline's load and engine come first, and again with every repeat."""

    def to_figures(self) -> dict[str, Any]:
        """The figures that `live_coserving` prints; the ratios are means over the headline's repeats."""
        figures = [case.to_figures(has_curve=self.has_curve) for case in self.cases]
        ratios: dict[str, float | None] = dict.fromkeys(RATIOS)
        if self.cases:
            first = self.cases[0]
            repeats = [
                each["ratios"]
                for case, each in zip(self.cases, figures, strict=True)
                if (case.case, case.engine) == (first.case, first.engine)
            ]
            ratios = {name: mean_of([one[name] for one in repeats]) for name in RATIOS}
        found = {
            "ratios": ratios,
            "window_s": list(self.window_s),
            "checked_tokens": self.checked_tokens,
            "cpus": len(os.sched_getaffinity(0)),
            "ceilings_tokens_per_s": {n: round(w.offline_tokens_per_s, 1) for n, w in self.ceilings.items()},
            "loads": figures,
        }
        return found | ({"curves": curves(figures)} if self.has_curve else {})


def curve_name(over_alone: float) -> str:
    return f"target {over_alone:g} x alone"


def share_of(most_tokens_per_s: float, both: Window) -> float | None:
    """Offline rate over what the ceiling leaves after online work; None if it leaves nothing."""
    left = most_tokens_per_s - both.online_tokens_per_s
    return round(both.offline_tokens_per_s / left, 4) if left > 0.0 else None


def ratios_of(windows: Mapping[str, Window], targets: Targets) -> dict[str, float | None]:
    """The headline's ratios without rivals; None if a needed run is missing or a latency is infinite."""
    ratios: dict[str, float | None] = dict.fromkeys(RATIOS)
    both = windows.get(BOTH)
    if both is None:
        return ratios
    for ratio, ceiling in (("share", CAPPED), ("share_uncapped", CEILING)):
        if ceiling in windows:
            ratios[ratio] = share_of(windows[ceiling].offline_tokens_per_s, both)
    if ALONE in windows:
        pair = (both, windows[ALONE])
        met = [attainment(window.records, targets.ttft_s, targets.tpot_s) for window in pair]
        ratios["attainment_minus_alone"] = round(met[0] - met[1], 4)
        ratios["ttft_p99_vs_alone"] = ttft_p99_ratio(both.records, windows[ALONE].records)
    return ratios


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean; None if a value is None."""
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if len(known) == len(values) else None


def curves(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over the repeats for every engine and load with a run of online work alone, compared with the rivals."""
    found = []
    results = [r for r in results if "alone" in r]
    keys = dict.fromkeys((r["engine"], r["load"], r["arrivals"]) for r in results)
    for key in keys:
        mine = [r for r in results if (r["engine"], r["load"], r["arrivals"]) == key]
        points = mean_points([r["points"] for r in mine])
        (alone,) = mean_points([[r["alone"]] for r in mine])
        ours, rivals = ([p for p in points if p.is_rival is wanted] for wanted in (False, True))
        ceiling = mean_of([offline_of(r, CEILING) for r in mine])
        found.append(
            dict(zip(("engine", "load", "arrivals"), key, strict=True))
            | {
                "name": Case(key[1], key[2]).name,
                "alone": alone,
                "points": points,
                "rivals": standing(ours, rivals, alone, ceiling),
                "capped_tokens_per_s": mean_of([offline_of(r, CAPPED) for r in mine]),
                "ceiling_tokens_per_s": ceiling,
            }
        )
    return found


def offline_of(result: Mapping[str, Any], run_name: str) -> float | None:
    """The run's offline tokens/s; None without such a run."""
    figures = [float(one["offline_tokens_per_s"]) for one in result["runs"] if one["run"] == run_name]
    return figures[0] if figures else None


def jsonable(value: Any) -> Any:
    """The value with points replaced by their JSON."""
    if isinstance(value, Point):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: jsonable(one) for key, one in value.items()}
    return [jsonable(one) for one in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """Restores the result of ``jsonable``, with its points."""
    if isinstance(value, Mapping):
        if "tpot_p50_ms" in value and "name" in value:
            return Point.from_json(value)
        return {key: from_json(one) for key, one in value.items()}
    return [from_json(one) for one in value] if isinstance(value, list) else value
