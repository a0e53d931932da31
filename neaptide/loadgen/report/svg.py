"""Plots as inline SVG, without scripts or external files, coloured by the page's style.

Series have the classes ``s0``, ``s1``, ...; the page defines their colours for light and dark mode.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 10, 34
CHAR_WIDTH, ROW_HEIGHT = 6.5, 13
"""Approximate size of text in a plot."""
MOST_TICKS = 5
LEAST_SPAN = 1e-9
"""Smallest span of an axis relative to its begin; less means a single value."""
MOST_POINTS = 400
"""Most points per line: more are not visible."""


@dataclass(slots=True, frozen=True)
class Line:
    """One series; points without a value are gaps."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]


@dataclass(slots=True, frozen=True)
class Plot:
    """Lines or stacked areas over one axis."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    stacked: bool = False
    x_marks: Sequence[tuple[str, float]] = ()
    """Vertical lines for the targets."""
    y_max: float | None = None

    @property
    def is_empty(self) -> bool:
        return not any(y is not None for line in self.lines for y in line.ys)


def cumulative(name: str, values: Sequence[float]) -> Line:
    """Percentage of the values that are at most x."""
    ordered = sorted(values)
    count = len(ordered)
    picked = sorted({round(k * (count - 1) / (MOST_POINTS - 1)) for k in range(MOST_POINTS)}) if count else []
    return Line(name, [ordered[k] for k in picked], [100 * (k + 1) / count for k in picked])


def figure(plot: Plot) -> str:
    """A ``<figure>`` with the plot and its legend, or a note if there is no data."""
    head = f"<figcaption>{escape(plot.title)} <span>{escape(plot.y_label)}</span></figcaption>"
    if plot.is_empty:
        return f"<figure>{head}<p class='none'>no data from this server</p></figure>"
    legend = "".join(
        f"<span class='s{k}'><i></i>{escape(line.name)}</span>"
        for k, line in enumerate(plot.lines)
        if len(plot.lines) > 1
    )
    return f"<figure>{head}{_svg(plot)}<div class='legend'>{legend}</div></figure>"


def _svg(plot: Plot) -> str:
    tops = _stack(plot.lines) if plot.stacked else [list(line.ys) for line in plot.lines]
    known = [y for ys in tops for y in ys if y is not None]
    xs = [x for line in plot.lines for x in line.xs] + [x for _, x in plot.x_marks]
    x_ticks, y_ticks = ticks(min(0.0, *xs), max(xs)), ticks(0.0, plot.y_max or max(known))
    frame = _Frame(x_ticks[0], max(x_ticks[-1], max(xs)), y_ticks[0], y_ticks[-1])
    parts = [frame.axes(plot, x_ticks, y_ticks)]
    below: list[float | None] = [0.0] * len(plot.lines[0].xs) if plot.stacked else []
    for k, (line, ys) in enumerate(zip(plot.lines, tops, strict=True)):
        if plot.stacked:
            parts.append(f"<path class='area s{k}' d='{frame.area(line.xs, ys, below)}'/>")
            below = ys
        else:
            parts.append(f"<path class='line s{k}' d='{frame.path(line.xs, ys)}'/>")
    parts += _marks(plot.x_marks, frame)
    label = escape(f"{plot.title}: {plot.y_label} over {plot.x_label}", quote=True)
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"


def _marks(marks: Sequence[tuple[str, float]], frame: "_Frame") -> list[str]:
    """Vertical lines with names at the bottom; a name that would overlap another moves up."""
    parts = []
    rows: list[list[tuple[float, float]]] = []
    for name, x in sorted(marks, key=lambda mark: mark[1]):
        at = frame.x(x)
        flip = at > WIDTH * 0.7
        start = at - 4 - CHAR_WIDTH * len(name) if flip else at + 4
        place = (start, start + CHAR_WIDTH * len(name))
        free = (row for row, taken in enumerate(rows) if all(place[0] > b or place[1] < a for a, b in taken))
        if (row := next(free, len(rows))) == len(rows):
            rows.append([])
        rows[row].append(place)
        parts.append(f"<path class='mark' d='M{at:.1f} {TOP}V{HEIGHT - BOTTOM}'/>")
        anchor = f"x='{at - 4 if flip else at + 4:.1f}' text-anchor='{'end' if flip else 'start'}'"
        parts.append(f"<text {anchor} y='{HEIGHT - BOTTOM - 6 - ROW_HEIGHT * row}'>{escape(name)}</text>")
    return parts


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``."""
    if high - low <= LEAST_SPAN * max(1.0, abs(low)):
        high = low + 1.0
    raw = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


@dataclass(slots=True, frozen=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (min(value, self.y_high) - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)
        )

    def path(self, xs: Sequence[float], ys: Sequence[float | None]) -> str:
        """A line with gaps at missing values."""
        parts, pen = [], "M"
        for x, y in zip(xs, ys, strict=True):
            if y is None:
                pen = "M"
                continue
            # a single point is a dot: the round cap of a line of length zero
            parts.append(f"{pen}{self.x(x):.1f} {self.y(y):.1f}" + ("h0" if pen == "M" else ""))
            pen = "L"
        return "".join(parts)

    def area(self, xs: Sequence[float], tops: Sequence[float | None], bottoms: Sequence[float | None]) -> str:
        points = [(x, top or 0.0, bottom or 0.0) for x, top, bottom in zip(xs, tops, bottoms, strict=True)]
        there = "L".join(f"{self.x(x):.1f} {self.y(top):.1f}" for x, top, _ in points)
        back = "L".join(f"{self.x(x):.1f} {self.y(bottom):.1f}" for x, _, bottom in reversed(points))
        return f"M{there}L{back}Z"

    def axes(self, plot: Plot, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
        parts = [f"<path class='grid' d='M{LEFT} {self.y(tick):.1f}H{WIDTH - RIGHT}'/>" for tick in y_ticks]
        parts += [
            f"<text x='{LEFT - 5}' y='{self.y(tick) + 4:.1f}' text-anchor='end'>{shown(tick)}</text>"
            for tick in y_ticks
        ]
        parts += [
            f"<text x='{self.x(tick):.1f}' y='{HEIGHT - BOTTOM + 14}' text-anchor='middle'>{shown(tick)}</text>"
            for tick in x_ticks
            if tick <= self.x_high
        ]
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f"<text x='{middle}' y='{HEIGHT - 4}' text-anchor='middle'>{escape(plot.x_label)}</text>")
        return "".join(parts)


def shown(value: float) -> str:
    """A short form: 1.5k, 2M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _stack(lines: Sequence[Line]) -> list[list[float | None]]:
    """The upper edges of stacked areas over the same xs."""
    tops: list[list[float | None]] = []
    sums = [0.0] * len(lines[0].xs)
    for line in lines:
        sums = [below + (y or 0.0) for below, y in zip(sums, line.ys, strict=True)]
        tops.append(list(sums))
    return tops
