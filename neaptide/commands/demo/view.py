"""The demo's display: charts and a table in a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from neaptide.commands.demo.chart import ASCII, LABEL_WIDTH, UNICODE, latency_chart, rate_chart
from neaptide.commands.demo.state import BOTH, DemoState, rates_per_s
from neaptide.loadgen.percentiles import Percentiles, percentiles

RATE_WINDOW = 4
"""Number of moments that a displayed rate covers."""
MOST_COLUMNS = 90
PLAIN_PERIOD_S = 2.5


class View(Protocol):
    def __enter__(self) -> object: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def update(self, state: DemoState) -> None: ...


def view_for(console: Console) -> View:
    return _LiveView(console) if console.is_interactive else _PlainView(console)


def rates_now(state: DemoState) -> tuple[float, float]:
    """Online and offline tokens per second over the last moments."""
    return rates_per_s(state.moments[-RATE_WINDOW:][0], state.moments[-1])


def chat_latencies_ms(state: DemoState) -> tuple[Percentiles, Percentiles]:
    """TTFT and TPOT percentiles of the chats."""
    records = [record for _, record in state.chats]
    ttft, tpot = percentiles([r.ttft_s for r in records]), percentiles([r.tpot_s for r in records])
    return Percentiles(*(1e3 * v for v in ttft)), Percentiles(*(1e3 * v for v in tpot))


class _LiveView:
    """A display that redraws in place and fits into 24 lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4)

    def __enter__(self) -> "_LiveView":
        self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, state: DemoState) -> None:
        glyphs = ASCII if self._console.options.ascii_only else UNICODE
        columns = min(max(self._console.width - LABEL_WIDTH, 20), MOST_COLUMNS)
        charts = [chart(state, columns, glyphs) for chart in (rate_chart, latency_chart)]
        for chart in charts:
            chart.no_wrap = True
        title = Text(f"neaptide demo, {state.elapsed_s:.0f} s: {state.act}")
        self._live.update(Group(title, *charts, self._numbers(state), self._progress(state)))

    def _numbers(self, state: DemoState) -> Table:
        rates = rates_now(state)
        ttft_ms, tpot_ms = chat_latencies_ms(state)
        latencies = (f"{ttft_ms.p50:.0f} / {ttft_ms.p99:.0f}", f"{tpot_ms.p50:.0f} / {tpot_ms.p99:.0f}")
        table = Table()
        for column in ("", "tokens/s", "running", "waiting", "KV blocks", "TTFT p50/p99 ms", "TPOT p50/p99 ms"):
            table.add_column(column, justify="left" if not column else "right")
        for name, label, rate in (("online", "chat", rates[0]), ("offline", "batch", rates[1])):
            row = [state.metrics.sum(f"neaptide_requests_{what}", **{"class": name}) for what in ("running", "waiting")]
            row.append(state.metrics.sum("neaptide_kv_blocks", state=name))
            shown = latencies if name == "online" and state.chats else ("", "")
            table.add_row(label, f"{rate:,.0f}", *(f"{value:,.0f}" for value in row), *shown)
        return table

    def _progress(self, state: DemoState) -> Table:
        done, total = state.progress
        bar = Table.grid(padding=(0, 1))
        progress = ProgressBar(total=max(total, 1), completed=done, width=40)
        bar.add_row(Text(f"batch {state.batch['status']}"), progress, Text(f"{done}/{total}"))
        return bar


class _PlainView:
    """One line every few seconds, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0

    def __enter__(self) -> "_PlainView":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def update(self, state: DemoState) -> None:
        done, total = state.progress
        is_end = state.act == BOTH and total > 0 and done == total
        if state.elapsed_s < self._next_s and not is_end:
            return
        self._next_s = state.elapsed_s + PLAIN_PERIOD_S
        online, offline = rates_now(state)
        line = f"{state.elapsed_s:5.1f} s  {state.act:11}  tok/s chat {online:4.0f} batch {offline:4.0f}"
        if state.act == BOTH:
            line += f"  lines {done}/{total}"
        if state.chats:
            ttft_ms, tpot_ms = chat_latencies_ms(state)
            line += f"  chats {len(state.chats)}  TTFT p50/p99 {ttft_ms.p50:.0f}/{ttft_ms.p99:.0f} ms"
            line += f"  TPOT {tpot_ms.p50:.0f}/{tpot_ms.p99:.0f} ms"
        self._console.print(line, highlight=False, soft_wrap=True)
