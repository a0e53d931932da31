"""Draws the headline of the live experiment, for a page that is 800 pixels wide.

It shows offline throughput over chat latency, at the median and at p99, with one row for each set of kernels. Our curve
is labelled with its targets. A rival that is too slow for the axis is drawn at the right edge, with an arrow and its
figure. Our point at such a rival's pace is drawn in the same way.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.live.curve import AS_SLOW, Curve, Point

PANELS = (
    ("tpot_p50_ms", "time per token, median (ms)"),
    ("tpot_p99_ms", "time per token, p99 (ms)"),
)
WIDTH_INCHES, ROW_INCHES, TITLE_INCHES, DPI = 8.0, 3.3, 0.35, 100
OURS, REFERENCE, TEXT = "#0b7285", "#868e96", "#343a40"
RIVALS = (("#e8590c", "s"), ("#c2255c", "D"), ("#6741d9", "^"), ("#e67700", "v"))
SMALL = 9
"""Font size in points."""
MOST_OF_OURS = 2.5
"""The axis ends at this many times our slowest point, unless all rivals are left of that."""
FOOT = 0.08
"""Fraction of the height; a label below a lower point would overlap the axis."""
LEAST_APART = 0.09
"""Least distance between names of rivals at the edge, as a fraction of the highest point."""
NOTE = {"textcoords": "offset points", "fontsize": SMALL}


def draw_picture(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws ``curves``, as made by ``findings.curves``, at the load of the first one."""
    from matplotlib.figure import Figure  # no pyplot: it needs a display and keeps global state

    shown = [curve for curve in curves if curve["name"] == curves[0]["name"]]
    size = (WIDTH_INCHES, ROW_INCHES * len(shown) + TITLE_INCHES)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
    title = f"Batch speed against chat latency, chats at {curves[0]['load']:.0%} load (upper left is best)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=TEXT)
    # One legend per row, because each set of kernels has other rivals.
    for row, curve in zip(figure.subfigures(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        row.set_facecolor("white")
        panels = row.subplots(1, len(PANELS), sharey=True)
        for axes, (latency, label) in zip(panels, PANELS, strict=True):
            draw_panel(axes, curve, latency)
            axes.set_xlabel(label, fontsize=SMALL, color=TEXT)
        panels[0].set_ylabel("batch tokens/s", fontsize=SMALL, color=TEXT)
        keys = legend_of(curve)
        row.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False, fontsize=SMALL, labelcolor=TEXT)
    figure.savefig(path)


def legend_of(curve: Mapping[str, Any]) -> list[Any]:
    from matplotlib.lines import Line2D

    ours = f"{curve['engine']} (at targets of N x chat alone)"
    reference: dict[str, Any] = {"color": REFERENCE, "linewidth": 1}
    keys = [Line2D([], [], color=OURS, marker="o", label=ours)]
    keys.append(Line2D([], [], linestyle=":", label="chat alone", **reference))
    if curve["ceiling_tokens_per_s"] is not None:
        keys.append(Line2D([], [], linestyle="--", label="batch alone", **reference))
    for rival, (colour, marker) in rivals_of(curve):
        keys.append(Line2D([], [], linestyle="", color=colour, marker=marker, label=rival.name))
    return keys


def rivals_of(curve: Mapping[str, Any]) -> list[tuple[Point, tuple[str, str]]]:
    """Each rival with its colour and marker."""
    rivals = [point for point in curve["points"] if point.is_rival]
    return [(rival, RIVALS[number % len(RIVALS)]) for number, rival in enumerate(rivals)]


def draw_panel(axes: Any, curve: Mapping[str, Any], latency: str) -> None:
    ours = [p for p in curve["points"] if not p.is_rival and math.isfinite(getattr(p, latency))]
    ceiling, edge_ms = curve["ceiling_tokens_per_s"], edge_of(curve, latency)
    most = max([p.offline_tokens_per_s for p in curve["points"]] + [ceiling or 1.0])
    axes.set_xlim(0, edge_ms)
    axes.set_ylim(0, 1.1 * most)
    reference = {"color": REFERENCE, "linewidth": 1}
    axes.axvline(getattr(curve["alone"], latency), linestyle=":", **reference)
    if ceiling is not None:
        axes.axhline(ceiling, linestyle="--", **reference)
    line = Curve.through(ours, curve["alone"], latency)
    axes.plot((*line.latencies_ms, edge_ms), (*line.tokens_per_s, line.tokens_per_s[-1]), color=OURS, alpha=0.35)
    for point in (p for p in ours if getattr(p, latency) <= edge_ms):
        at = getattr(point, latency), point.offline_tokens_per_s
        axes.plot(*at, "o", color=OURS)
        place = place_of_note(point.offline_tokens_per_s / most)
        axes.annotate(f"{point.over_alone:.3g}x", at, xytext=place, color=OURS, **NOTE)
    rivals = rivals_of(curve)
    coloured = [*((p, OURS) for p in ours), *((rival, colour) for rival, (colour, _) in rivals)]
    beyond = [(point, colour) for point, colour in coloured if getattr(point, latency) > edge_ms]
    for rival, (colour, marker) in rivals:
        if getattr(rival, latency) <= edge_ms:
            axes.plot(getattr(rival, latency), rival.offline_tokens_per_s, marker, color=colour)
    heights = apart([point.offline_tokens_per_s for point, _ in beyond], LEAST_APART * most)
    for (point, colour), height in zip(beyond, heights, strict=True):
        draw_beyond(axes, point, getattr(point, latency), (edge_ms, height), colour)
    axes.tick_params(labelsize=SMALL, colors=TEXT)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def place_of_note(height: float) -> tuple[int, int]:
    """Offset in points of a label from one of our points: below the line, but not over the axis labels.

    height: height of the point, as a fraction of the highest one.
    """
    return (4, -12) if height > FOOT else (8, 3)


def edge_of(curve: Mapping[str, Any], latency: str) -> float:
    """End of the axis: after the last point, or well after our last target if rivals are much slower."""
    latencies_ms: list[float] = [getattr(point, latency) for point in curve["points"]]
    finite_ms = [each for each in latencies_ms if math.isfinite(each)]
    ours_ms = [
        ms
        for point, ms in zip(curve["points"], latencies_ms, strict=True)
        if not point.is_rival and point.name != AS_SLOW and math.isfinite(ms)
    ]
    our_last_ms = max([getattr(curve["alone"], latency), *ours_ms])
    last_ms = max([our_last_ms, *finite_ms])
    is_cut = last_ms > MOST_OF_OURS * our_last_ms or len(finite_ms) < len(latencies_ms)
    return MOST_OF_OURS * our_last_ms if is_cut else 1.08 * last_ms


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Heights for the labels of points at these heights, in the same order and at least ``least`` apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + least)
    moved = sum(placed) - sum(heights)
    return [height - moved / len(heights) for height in placed]


def draw_beyond(axes: Any, point: Point, at_ms: float, note_at: tuple[float, float], colour: str) -> None:
    """Draws a point beyond the axis: an arrow at its height, and its figure."""
    axes.plot(note_at[0], point.offline_tokens_per_s, ">", color=colour, clip_on=False)
    text = "never ends" if math.isinf(at_ms) else f"{at_ms:,.0f} ms"
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}
    axes.annotate(text, note_at, xytext=(-7, 0), ha="right", va="center", color=colour, bbox=box, **NOTE)
