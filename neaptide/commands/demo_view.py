"""What the demo shows while it runs: a live table in a terminal, plain lines elsewhere."""

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from neaptide.loadgen.percentiles import percentiles

if TYPE_CHECKING:
    from neaptide.commands.demo import DemoState

SERIES = ("neaptide_step_tokens_total", "neaptide_requests_", "neaptide_kv_blocks")
RATE_WINDOW = 8
"""Updates that a rate is averaged over."""


class View(Protocol):
    def __enter__(self) -> object: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def update(self, state: "DemoState") -> None: ...


class Rates:
    """Tokens per second of each class, from the engine's counters."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque(maxlen=RATE_WINDOW)

    def update(self, state: "DemoState") -> tuple[float, float]:
        """Online and offline tokens per second."""
        name = "neaptide_step_tokens_total"
        online, offline = (state.metrics.sum(name, **{"class": c}) for c in ("online", "offline"))
        self._points.append((state.elapsed_s, online, offline))
        (t0, online0, offline0), (t1, online1, offline1) = self._points[0], self._points[-1]
        span_s = max(t1 - t0, 1e-9)
        return (online1 - online0) / span_s, (offline1 - offline0) / span_s


def _progress(state: "DemoState") -> tuple[int, int]:
    counts = state.batch["request_counts"]
    return counts["completed"] + counts["failed"], counts["total"]


class DemoView:
    """Redraws in place."""

    def __init__(self, console: Console, ttft_slo_ms: float, tpot_slo_ms: float) -> None:
        self._live = Live(console=console, refresh_per_second=4)
        self._slo_ms = {"TTFT": ttft_slo_ms, "TPOT": tpot_slo_ms}
        self._rates = Rates()

    def __enter__(self) -> "DemoView":
        self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, state: "DemoState") -> None:
        online, offline = self._rates.update(state)
        rates = Table(title=f"neaptide demo, {state.elapsed_s:.0f} s", title_justify="left")
        for column in ("", "tokens/s", "running", "waiting", "KV blocks"):
            rates.add_column(column, justify="left" if not column else "right")
        for name, label, rate in (("online", "chat (online)", online), ("offline", "batch (offline)", offline)):
            row = [state.metrics.sum(f"neaptide_requests_{what}", **{"class": name}) for what in ("running", "waiting")]
            row.append(state.metrics.sum("neaptide_kv_blocks", state=name))
            rates.add_row(label, f"{rate:,.0f}", *(f"{value:,.0f}" for value in row))
        cached, free = (state.metrics.sum("neaptide_kv_blocks", state=s) for s in ("cached", "free"))
        rates.add_row("prefix cache / free", "", "", "", f"{cached:,.0f} / {free:,.0f}")
        done, total = _progress(state)
        bar = Table.grid(padding=(0, 1))
        progress = ProgressBar(total=max(total, 1), completed=done, width=40)
        bar.add_row(Text(f"batch {state.batch['status']}"), progress, Text(f"{done}/{total}"))
        self._live.update(Group(rates, self._latencies(state), bar))

    def _latencies(self, state: "DemoState") -> Table:
        table = Table()
        for column in ("chat latency, ms", "p50", "p99", "target", "answers"):
            table.add_column(column, justify="right")
        records = [record for _, record in state.chats]
        for name, values in (("TTFT", [r.ttft_s for r in records]), ("TPOT", [r.tpot_s for r in records])):
            p = percentiles(values)
            style = "green" if not p.p99 * 1e3 > self._slo_ms[name] else "red"
            cells = (f"{p.p50 * 1e3:.0f}", Text(f"{p.p99 * 1e3:.0f}", style), f"{self._slo_ms[name]:.0f}")
            table.add_row(name, *cells, str(len(records)))
        return table


class _PlainView:
    """A line every few seconds, for pipes and logs."""

    PERIOD_S = 5.0

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rates = Rates()
        self._next_s = 0.0

    def __enter__(self) -> "_PlainView":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        pass

    def update(self, state: "DemoState") -> None:
        online, offline = self._rates.update(state)
        done, total = _progress(state)
        is_end = total > 0 and done == total
        if state.elapsed_s < self._next_s and not is_end:
            return
        self._next_s = state.elapsed_s + self.PERIOD_S
        ttft = percentiles([record.ttft_s for _, record in state.chats])
        tpot = percentiles([record.tpot_s for _, record in state.chats])
        self._console.print(
            f"{state.elapsed_s:5.1f} s  batch {state.batch['status']} {done}/{total}  "
            f"tok/s chat {online:.0f} batch {offline:.0f}  "
            f"chat answers {len(state.chats)}  "
            f"TTFT p50/p99 {ttft.p50 * 1e3:.0f}/{ttft.p99 * 1e3:.0f} ms  "
            f"TPOT {tpot.p50 * 1e3:.0f}/{tpot.p99 * 1e3:.0f} ms",
            highlight=False,
            soft_wrap=True,
        )


def plain_view(console: Console) -> View:
    return _PlainView(console)
