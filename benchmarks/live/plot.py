"""Draws every point of the live experiment: offline throughput over online latency, with one row for each load."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.live.curve import Curve, Point

PANELS = (("tpot_p50_ms", "TPOT p50, ms"), ("tpot_p99_ms", "TPOT p99, ms"), ("ttft_p99_ms", "TTFT p99, ms"))
OUR_COLOURS = ("#0b7285", "#5f3dc4")
RIVAL_COLOURS = ("#e8590c", "#868e96", "#c2255c", "#f08c00")
MARKERS = ("s", "D", "^", "v")
ROW_INCHES, WIDTH_INCHES = 3.6, 11.5
ROOM = 1.15
"""Factor between the last finite point and the end of the axis."""


def draw(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws ``curves``, as made by ``findings.curves``."""
    from matplotlib.figure import Figure  # no pyplot: it needs a display and keeps global state

    rows = list(dict.fromkeys(curve["name"] for curve in curves))
    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * len(rows) + 0.9), layout="constrained")
    grid = figure.subplots(len(rows), len(PANELS), squeeze=False)
    for axes_row, name in zip(grid, rows, strict=True):
        of_row = [curve for curve in curves if curve["name"] == name]
        for axes, (latency, label) in zip(axes_row, PANELS, strict=True):
            num_rivals = 0  # per row, because each engine has other rivals
            for curve, colour in zip(of_row, OUR_COLOURS, strict=False):
                num_rivals += draw_panel(axes, curve, latency, colour, num_rivals)
            axes.set_xlabel(label)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        axes_row[0].set_ylabel(f"load {name}\noffline tokens/s")
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("Batch speed against chat latency (upper left is best)", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=130)


def draw_panel(axes: Any, curve: Mapping[str, Any], latency: str, colour: str, first_rival: int) -> int:
    """Draws our curve with its targets, the rivals, and the latency of online work alone. Returns the number of
    rivals."""
    ours = [point for point in curve["points"] if not point.is_rival]
    rivals = [point for point in curve["points"] if point.is_rival]
    edge = ROOM * widest(curve["points"], latency)
    line = Curve.through(ours, curve["alone"], latency)
    axes.plot(line.latencies_ms, line.tokens_per_s, color=colour, alpha=0.4, linewidth=1.5)
    shown = [p for p in ours if math.isfinite(getattr(p, latency))]
    axes.plot(
        [getattr(p, latency) for p in shown],
        [p.offline_tokens_per_s for p in shown],
        "o",
        color=colour,
        label=f"{curve['engine']}, TPOT targets in times online alone",
    )
    for point in shown:
        at = getattr(point, latency), point.offline_tokens_per_s
        axes.annotate(
            f"{point.over_alone:.3g}x", at, xytext=(5, -10), textcoords="offset points", fontsize=8, color=colour
        )
    axes.axvline(getattr(curve["alone"], latency), color=colour, linestyle=":", linewidth=1, label="online alone")
    for number, rival in enumerate(rivals, first_rival):
        draw_rival(axes, rival, latency, edge, RIVAL_COLOURS[number % 4], MARKERS[number // 4 % 4])
    return len(rivals)


def draw_rival(axes: Any, rival: Point, latency: str, edge: float, colour: str, marker: str) -> None:
    """Draws a rival; at the right edge, with an arrow, if too few requests ended for a latency."""
    at_ms = getattr(rival, latency)
    where, marker = (edge, ">") if math.isinf(at_ms) else (at_ms, marker)
    axes.plot(where, rival.offline_tokens_per_s, marker, color=colour, label=rival.name)


def widest(points: Sequence[Point], latency: str) -> float:
    return max((getattr(p, latency) for p in points if math.isfinite(getattr(p, latency))), default=1.0)
