"""Prints the tables of the live experiment."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import print_table
from benchmarks.live.latency import percentile_of_all, tpots_s, ttfts_s
from benchmarks.live.plan import PHASES, Window
from neaptide.loadgen.client.recorder import attainment


def in_ms(values_s: Sequence[float]) -> list[float | None] | None:
    """p50, p90 and p99 in ms. Infinite ones are None; the whole is None if p50 is infinite or there are no values."""
    found = [percentile_of_all(values_s, q) for q in (0.5, 0.9, 0.99)]
    if not math.isfinite(found[0]):
        return None
    return [round(1e3 * value, 1) if math.isfinite(value) else None for value in found]


def summary(name: str, window: Window, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    return {
        "run": name,
        "online_requests": len(window.records),
        "online_failed": sum(r.error is not None for r in window.records),
        "ttft_ms": in_ms(ttfts_s(window.records)),
        "tpot_ms": in_ms(tpots_s(window.records)),
        "attainment": round(attainment(window.records, ttft_s, tpot_s), 4) if window.records else None,
        "online_tokens_per_s": round(window.online_tokens_per_s, 1),
        "offline_tokens_per_s": round(window.offline_tokens_per_s, 1),
        "mean_step_ms": round(window.mean_step_ms, 2),
        "phase_ms": {p: round(v, 3) for p, v in window.phase_ms.items()},
        "preemptions": window.preemptions,
        "prediction_mape": round(window.prediction_error, 3),
    }


def print_runs(title: str, runs: list[dict[str, Any]]) -> None:
    """Prints the results of online and offline requests in each run."""

    def ms(values: list[float | None] | None) -> str:
        if values is None:
            return "-"
        return " / ".join("none" if value is None else f"{value:.0f}" for value in (values[0], values[2]))

    columns = ["run", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "attainment", "failed", "online tok/s", "offline tok/s"]
    rows = [
        [
            r["run"],
            ms(r["ttft_ms"]),
            ms(r["tpot_ms"]),
            "-" if r["attainment"] is None else f"{r['attainment']:.3f}",
            str(r["online_failed"]),
            f"{r['online_tokens_per_s']:.0f}",
            f"{r['offline_tokens_per_s']:.0f}",
        ]
        for r in runs
    ]
    print_table(title, columns, rows)


def print_load(result: dict[str, Any]) -> None:
    more = f", {result['arrivals']}, {result['engine']}" if "engine" in result else ""
    print_runs(f"live co-serving, load {result['load']}{more}", result["runs"])
    rows = [
        [
            r["run"],
            f"{r['mean_step_ms']:.1f}",
            *(f"{r['phase_ms'].get(p, 0.0):.2f}" for p in PHASES),
            f"{r['prediction_mape']:.3f}",
        ]
        for r in result["runs"]
    ]
    print_table("time of a step, ms", ["run", "step", *PHASES, "prediction MAPE"], rows)


def print_curve(curve: Mapping[str, Any]) -> None:
    """Prints every point of one engine at one load, best latency first, and compares the rivals."""

    def ms(value: float) -> str:
        return "none" if math.isinf(value) else f"{value:.0f}"

    rows = []
    for p in sorted([curve["alone"], *curve["points"]], key=lambda point: point.tpot_p50_ms):
        pairs = [(f"{what}_p50_ms", f"{what}_p99_ms") for what in ("tpot", "ttft")]
        latencies = [f"{ms(getattr(p, p50))} / {ms(getattr(p, p99))}" for p50, p99 in pairs]
        place = curve["rivals"].get(p.name, {}).get("tpot_p50_ms")
        side = "" if place is None else "ABOVE" if place["is_above"] else "below"
        stands = "" if place is None else f"{side}: {place['curve_tokens_per_s']:.0f}"
        rows.append([p.name, *latencies, f"{p.attainment:.3f}", f"{p.offline_tokens_per_s:.0f}", stands])
    columns = ["", "TPOT p50/p99 ms", "TTFT p50/p99 ms", "attainment", "offline tok/s", "rival to our curve"]
    print_table(f"{curve['engine']}, load {curve['name']}: offline work against latency", columns, rows)
