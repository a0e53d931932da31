"""Two text charts over one time axis: tokens per second by tier, and chats against their targets.

Tiers and latencies differ by character, not only by colour, because a terminal may have no colours.
"""

import math
from dataclasses import dataclass

from rich.text import Text

from neaptide.commands.demo.state import DemoState, rates_per_s

RATE_ROWS = 7
MET_ROWS = 3
"""Rows of the latency chart below the target's line, as thirds of the target. One row above the line shows misses."""
TARGET_ROW, MISSED_ROW = MET_ROWS + 1, MET_ROWS + 2
LABEL_WIDTH = 9
LEAST_BIN_S = 0.5
CHAT_STYLE, BATCH_STYLE, TTFT_STYLE, TPOT_STYLE, LINE_STYLE = "cyan", "magenta", "green", "yellow", "dim"


@dataclass(slots=True, frozen=True)
class Glyphs:
    chat: str
    batch: str
    ttft: str
    tpot: str
    both: str
    """Where TTFT and TPOT share a cell."""
    line: str


UNICODE = Glyphs("█", "░", "o", "x", "8", "─")
ASCII = Glyphs("#", ".", "o", "x", "8", "-")


def bin_s(elapsed_s: float, columns: int) -> float:
    """Seconds per column: half a second, doubled until everything fits."""
    length_s = LEAST_BIN_S
    while elapsed_s > columns * length_s:
        length_s *= 2
    return length_s


def binned_rates(state: DemoState, length_s: float) -> list[tuple[float, float]]:
    """Online and offline tokens per second of each column, from the moments at its edges."""
    if not state.moments:
        return []
    rates: list[tuple[float, float]] = []
    before, at = state.moments[0], 0
    for column in range(math.ceil(state.elapsed_s / length_s)):
        while at + 1 < len(state.moments) and state.moments[at].elapsed_s < (column + 1) * length_s:
            at += 1
        now = state.moments[at]
        if now is before:  # no scrape in this column
            rates.append(rates[-1] if rates else (0.0, 0.0))
            continue
        rates.append(rates_per_s(before, now))
        before = now
    return rates


def tops(rates: tuple[float, float], most: float, rows: int) -> tuple[int, int]:
    """Rows filled by chat from below, and by chat plus batch. A rate above 0 fills at least one row."""
    chat = max(round(rates[0] / most * rows), 1 if rates[0] > 0 else 0)
    both = round((rates[0] + rates[1]) / most * rows)
    return chat, max(both, chat + (1 if rates[1] > 0 else 0))


def rate_chart(state: DemoState, columns: int, glyphs: Glyphs) -> Text:
    """Stacked tokens per second by tier. The line is the batch's rate without chat."""
    rates = binned_rates(state, bin_s(state.elapsed_s, columns))
    ceiling = state.batch_alone_per_s
    most = max([sum(rate) for rate in rates] + [ceiling if ceiling == ceiling else 0.0, 1.0])
    filled = [tops(rate, most, RATE_ROWS) for rate in rates]
    ceiling_row = None if math.isnan(ceiling) else max(round(ceiling / most * RATE_ROWS), 1)
    chart = Text()
    for row in range(RATE_ROWS, 0, -1):
        label = f"{most:,.0f}" if row == RATE_ROWS else f"{ceiling:,.0f}" if row == ceiling_row else ""
        chart.append(f"{label:>{LABEL_WIDTH - 1}} ")
        for column in range(columns):
            chat, both = filled[column] if column < len(filled) else (0, 0)
            if row <= chat:
                chart.append(glyphs.chat, CHAT_STYLE)
            elif row <= both:
                chart.append(glyphs.batch, BATCH_STYLE)
            else:
                chart.append(glyphs.line if row == ceiling_row else " ", LINE_STYLE)
        chart.append("\n")
    chart.append(f"{'tokens/s':>{LABEL_WIDTH - 1}} ")
    chart.append(f"{glyphs.chat} chat", CHAT_STYLE)
    chart.append(f"  {glyphs.batch} batch", BATCH_STYLE)
    if ceiling_row is not None:
        chart.append(f"  {glyphs.line} batch without chat: {ceiling:,.0f}", LINE_STYLE)
    return chart


def latency_marks(state: DemoState, length_s: float) -> dict[int, tuple[float, float]]:
    """Column -> the worst TTFT and TPOT of the chats that ended in it, as fractions of the targets."""
    worst: dict[int, tuple[float, float]] = {}
    for _, record in state.chats:
        if record.ttft_s is None:
            continue
        column = int(state.ended_at_s(record) / length_s)
        ttft, tpot = worst.get(column, (0.0, 0.0))
        of_tpot = (record.tpot_s or 0.0) * 1e3 / state.load.tpot_slo_ms
        worst[column] = (max(ttft, record.ttft_s * 1e3 / state.load.ttft_slo_ms), max(tpot, of_tpot))
    return worst


def latency_row(share: float) -> int:
    """Row, counted from below: above the target's line for a miss, below it otherwise."""
    return MISSED_ROW if share > 1.0 else min(int(share * MET_ROWS) + 1, MET_ROWS)


def latency_chart(state: DemoState, columns: int, glyphs: Glyphs) -> Text:
    """The worst chat of each column, relative to its targets, which are the line."""
    marks = latency_marks(state, bin_s(state.elapsed_s, columns))
    rows = {column: (latency_row(ttft), latency_row(tpot)) for column, (ttft, tpot) in marks.items()}
    chart = Text()
    for row in range(MISSED_ROW, 0, -1):
        chart.append(f"{'target' if row == TARGET_ROW else '':>{LABEL_WIDTH - 1}} ")
        for column in range(columns):
            ttft, tpot = rows.get(column, (0, 0))
            if row == ttft == tpot:
                chart.append(glyphs.both, TTFT_STYLE)
            elif row == ttft:
                chart.append(glyphs.ttft, TTFT_STYLE)
            elif row == tpot:
                chart.append(glyphs.tpot, TPOT_STYLE)
            else:
                chart.append(glyphs.line if row == TARGET_ROW else " ", LINE_STYLE)
        chart.append("\n")
    chart.append(f"{'chat':>{LABEL_WIDTH - 1}} ")
    chart.append(f"{glyphs.ttft} TTFT, target {state.load.ttft_slo_ms:,.0f} ms", TTFT_STYLE)
    chart.append(f"  {glyphs.tpot} TPOT, target {state.load.tpot_slo_ms:,.0f} ms", TPOT_STYLE)
    chart.append(f"  {glyphs.both} both; worst chat of each moment", LINE_STYLE)
    return chart
