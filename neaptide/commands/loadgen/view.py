"""Display of a running ``neaptide loadgen``: a table redrawn in place in a terminal, plain lines elsewhere."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from neaptide.loadgen.percentiles import percentiles
from neaptide.loadgen.report.summary import met
from neaptide.loadgen.run.runner import Progress

PLAIN_PERIOD_S = 5.0
RECENT = 200
"""Number of recent requests that the percentiles cover."""


class RunView:
    """Display of one run on one server."""

    def __init__(self, console: Console, name: str) -> None:
        self._console = console
        self._name = name
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._said_s = -math.inf

    @property
    def shown(self) -> AbstractContextManager[Any]:
        """The view is visible while this context is open."""
        return self._live or nullcontext()

    def update(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(_table(self._name, progress))
        elif progress.elapsed_s - self._said_s >= PLAIN_PERIOD_S:
            self._said_s = progress.elapsed_s
            self._console.print(" | ".join(_words(self._name, progress)), highlight=False, soft_wrap=True)


def _words(name: str, progress: Progress) -> list[str]:
    """The parts of a run's plain line."""
    ended, failed, attained = _counts(progress)
    words = [f"{name} {progress.elapsed_s:.0f} s", f"sent {progress.num_sent}/{len(progress.shots)}", f"ended {ended}"]
    words += [f"failed {failed}"] if failed else []
    ttft, tpot = _times(progress)
    words += [f"TTFT {ttft} ms", f"TPOT {tpot} ms", f"met both {attained}"]
    rates = _rates(progress)
    words += [f"tokens/s {rates}"] if rates else []
    batch = _batch(progress)
    return words + ([batch] if batch else [])


def _table(name: str, progress: Progress) -> Group:
    ended, failed, attained = _counts(progress)
    ttft, tpot = _times(progress)
    table = Table(title=f"{name}, {progress.elapsed_s:.0f} s", title_justify="left", show_header=False)
    rows = [
        ("sent / in flight / ended", f"{progress.num_sent} / {progress.num_sent - ended} / {ended}"),
        ("failed", str(failed)),
        ("TTFT p50/p99, ms", ttft),
        ("TPOT p50/p99, ms", tpot),
        ("met both targets", attained),
        ("tokens/s online/offline", _rates(progress) or "-"),
        ("batch", _batch(progress) or "-"),
    ]
    for row in rows:
        table.add_row(*row)
    return Group(table, Text(f"of {len(progress.shots)} requests; figures of the last {RECENT}", style="dim"))


def _counts(progress: Progress) -> tuple[int, int, str]:
    """Ended, failed, and the fraction of recent requests that met both targets."""
    found = [a and b for a, b in met(progress.records[-RECENT:])]
    failed = sum(record.error is not None for _, record in progress.records)
    return len(progress.records), failed, f"{sum(found) / len(found):.1%}" if found else "-"


def _times(progress: Progress) -> tuple[str, str]:
    recent = [record for _, record in progress.records[-RECENT:] if record.error is None]
    ttft, tpot = (percentiles(values) for values in ([r.ttft_s for r in recent], [r.tpot_s for r in recent]))
    return _pair(ttft.p50, ttft.p99), _pair(tpot.p50, tpot.p99)


def _pair(low_s: float, high_s: float) -> str:
    return "-" if math.isnan(low_s) else f"{1e3 * low_s:.0f}/{1e3 * high_s:.0f}"


def _rates(progress: Progress) -> str | None:
    samples = progress.watch.samples
    if not samples:
        return None
    return "/".join(f"{samples[-1].tokens_per_s[name]:.0f}" for name in ("online", "offline"))


def _batch(progress: Progress) -> str | None:
    batch = progress.watch.batch
    if batch is None:
        return None
    counts = batch["request_counts"]
    return f"batch {batch['status']} {counts['completed'] + counts['failed']}/{counts['total']}"
