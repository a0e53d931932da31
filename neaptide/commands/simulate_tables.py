"""Prints simulations: one as a list of its measurements, several as tables with a row each."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from neaptide.cluster.simulation.result import ClusterResult
from neaptide.simulation.result import Percentiles, SimResult
from neaptide.simulation.simulator import Run

CLASSES = ("online", "offline")
BOUNDS = ("long_run", "window", "in_time")
WIDTH = 80
"""Columns of a terminal. Numbers are never cut: a long name is folded."""
CONCEDED = 0.01
"""Policies that have at most this share of the chats less in time count as equal, and offline work decides."""


def show_run(run: Run) -> None:
    result = run.result
    start_s, end_s = run.window_s
    console = Console(width=WIDTH)
    window = f"window {start_s:.1f} to {end_s:.1f} s"
    console.print(f"{result.policy} on {result.profile}, {window}, {result.steps} steps", highlight=False)
    table = Table(show_header=False)
    for name, value in _rows(result):
        table.add_row(name, value)
    console.print(table)


def show_replicas(result: ClusterResult) -> None:
    """Prints the figures of each replica, after those of the whole."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("replica", "from s", "to s", "at the end"):
        table.add_column(column.replace(" ", "\n"), no_wrap=True, vertical="bottom")
    for column in ("online requests", "attained% both", "TTFT ms p99", "offline tok/s", "hits% on/off", "steps"):
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True, vertical="bottom")
    for one in result.replicas:
        end = "-" if one.ended_s is None else f"{one.ended_s:.0f}"
        hits = f"{_bare(one.kv.online_hit_ratio)}/{_bare(one.kv.hit_ratio)}"
        table.add_row(
            one.name,
            f"{one.begins_s:.0f}",
            end,
            one.state,
            str(one.online.requests),
            _bare(one.online.attainment["both"]),
            _ms(one.online.ttft_s["p99"]),
            _rate(one.offline.tokens_per_s),
            hits,
            str(one.steps),
        )
    console = Console(width=WIDTH)
    console.print(table, highlight=False, crop=False)
    rows = result.rows
    console.print(
        f"router {result.router}, placement {result.placement}, {result.replica_hours:.2f} replica hours, "
        f"{result.failed_online} requests lost with their replica; offline rows: {rows.done} done, {rows.open} open, "
        f"{rows.given_back} leased again; {result.offline.deadline_misses} past their deadline",
        highlight=False,
    )


def short_names(names: Sequence[str]) -> list[str]:
    """Names without their modules, unless two would be the same."""
    short = [name.rpartition(":")[2] for name in names]
    return short if len(set(short)) == len(short) else list(names)


def show_comparison(runs: Sequence[tuple[str, Run]]) -> None:
    """Prints what the runs were, which is best, and a table of the chats and one of the offline work."""
    console = Console(width=WIDTH)
    for line in (_title(runs[0][1]), *_best(runs)):
        console.print(line, highlight=False, markup=False)
    for title, columns in (("chats", _chat_columns), ("offline", _offline_columns)):
        rows = [(name, dict(columns(run.result))) for name, run in runs if _has(run.result, title)]
        if rows:
            console.print(_policies_table(title, rows), highlight=False)
    for name, run in runs:
        if not run.result.valid:
            console.print(f"{name}: NOT VALID, the offline pool ran out of work", highlight=False, markup=False)


def _has(result: SimResult, title: str) -> bool:
    """Whether the run has anything in the table of that title."""
    return result.online.requests > 0 if title == "chats" else result.offline.bound_tokens_per_s["window"] is not None


def _policies_table(title: str, rows: Sequence[tuple[str, dict[str, str]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(title, overflow="fold", vertical="bottom")
    for column in rows[0][1]:
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    for name, row in rows:
        table.add_row(name, *row.values())
    return table


def _title(run: Run) -> str:
    settings, (start_s, end_s) = run.result.settings, run.window_s
    limit = "the rest of it" if settings.max_tokens is None else f"{settings.max_tokens:,}"
    return (
        f"{run.result.profile}, window {start_s:.1f} to {end_s:.1f} s, context {settings.max_model_len:,}, max_tokens "
        f"{limit}, TTFT {settings.ttft_slo_s:g} s, TPOT {1e3 * settings.tpot_slo_s:g} ms, noise "
        f"{settings.step_noise:.0%}, headroom {settings.headroom}, "
        f"{settings.max_num_batched_tokens:,} step tokens and {settings.max_num_seqs} slots unless @ says otherwise"
    )


def _best(runs: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """A sentence on the policy that did the most offline work, of those that have about the most chats in time."""
    both = [(name, run.result) for name, run in runs if all(_has(run.result, title) for title in ("chats", "offline"))]
    if len(both) < 2:
        return
    most = max(result.attained for _, result in both)
    name, best = max(
        ((name, result) for name, result in both if result.attained >= most - CONCEDED),
        key=lambda each: each[1].offline_tokens_per_s,
    )
    yield (
        f"Best: {name}, {_percent(best.attained)} of the chats in time and {_rate(best.offline_tokens_per_s)} offline "
        f"tokens/s, {_percent(best.offline.share_of_bound)} of what no policy could exceed."
    )


def _chat_columns(result: SimResult) -> Iterator[tuple[str, str]]:
    """The compared figures of online requests, by heading."""
    online, kv = result.online, result.kv
    yield "in time %\nTTFT/TPOT/both", "/".join(_bare(online.attainment[name]) for name in ("ttft", "tpot", "both"))
    yield "TTFT ms\np50/p99", _pair(online.ttft_s)
    yield "TPOT ms\np50/p99", _pair(online.tpot_s)
    yield "gap ms\np99/max", f"{_ms(online.itl_s['p99'])}/{_ms(online.longest_gap_s)}"
    yield "hits\n%", _bare(kv.online_hit_ratio)
    yield "pre-\nempted", str(result.preemptions.count_by_class["online"])


def _offline_columns(result: SimResult) -> Iterator[tuple[str, str]]:
    """The compared figures of offline work, by heading."""
    offline, kv = result.offline, result.kv
    yield "tok/s", _rate(offline.tokens_per_s)
    yield "of its\nbound %", _bare(offline.share_of_bound)
    yield "computed\ntok/s", _rate(offline.computed_tokens_per_s)
    yield "hits\n%", _bare(kv.hit_ratio)
    yield "pre-\nempted", str(result.preemptions.count_by_class["offline"])
    yield "computed\nagain", str(result.wasted_tokens)
    yield "longest\nwait s", "-" if offline.longest_wait_s is None else f"{offline.longest_wait_s:.0f}"


def _rows(result: SimResult) -> Iterator[tuple[str, str]]:
    online, offline, kv = result.online, result.offline, result.kv
    if online.requests:
        yield "online requests", str(online.requests)
        yield "TTFT p50 / p90 / p99", _three_ms(online.ttft_s)
        yield "TPOT p50 / p90 / p99", _three_ms(online.tpot_s)
        yield "gap p50 / p90 / p99", _three_ms(online.itl_s)
        yield "longest gap", f"{_ms(online.longest_gap_s)} ms"
        shares = " / ".join(_percent(online.attainment[name]) for name in ("ttft", "tpot", "both"))
        yield "attained TTFT / TPOT / both", shares
        yield "all tokens in time from arrival", _percent(online.attainment["both_from_arrival"])
        yield "online prefix hits", _percent(kv.online_hit_ratio)
        if online.goodput_rps is not None:
            yield "goodput", f"{online.goodput_rps:.2f} requests/s"
    if kv.saving_ratio_bound is not None:
        yield "offline requests completed", str(offline.requests_completed)
        yield "offline tokens/s, logical", _rate(offline.tokens_per_s)
        yield "of these output", _rate(offline.output_tokens_per_s)
        bounds = " / ".join(_rate(offline.bound_tokens_per_s[name]) for name in BOUNDS)
        yield "bound: long run / window / in time", f"{bounds} ({_percent(offline.share_of_bound)} of the last)"
        yield "offline tokens/s, computed", _rate(offline.computed_tokens_per_s)
        if offline.makespan_s is not None:
            yield "makespan", f"{offline.makespan_s:.1f} s"
        shares = " / ".join(_percent(x) for x in (kv.hit_ratio, kv.saving_ratio, kv.saving_ratio_bound))
        yield "prefix hits / saving / its bound", shares
    occupancy = kv.occupancy_by_class
    yield "KV online / offline / cached", " / ".join(_percent(occupancy[k]) for k in ("online", "offline", "cached"))
    yield "preemptions, online / offline", " / ".join(str(result.preemptions.count_by_class[k]) for k in CLASSES)
    yield "tokens computed again", str(result.wasted_tokens)
    prediction = result.prediction
    yield "step prediction: error / covered", f"{_percent(prediction['mape'])} / {_percent(prediction['coverage'])}"
    mean_ms, p99_ms = result.scheduler_ms["mean"], result.scheduler_ms["p99"]
    if mean_ms is not None and p99_ms is not None:
        yield "planning, mean / p99", f"{mean_ms:.2f} / {p99_ms:.2f} ms"
    yield "simulated in", f"{result.wall_s:.1f} s, {result.peak_memory_bytes / 2**20:.0f} MiB"
    if not result.valid:
        yield "NOT VALID", "the offline pool ran out of work inside the window"


def _three_ms(values: Percentiles) -> str:
    return " / ".join(_ms(value) for value in values.values()) + " ms"


def _pair(values: Percentiles) -> str:
    return f"{_ms(values['p50'])}/{_ms(values['p99'])}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:.0f}"


def _bare(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
