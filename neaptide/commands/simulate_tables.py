"""Prints simulations: one as a list of its measurements, several as a table with a row each."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from neaptide.cluster.simulation.result import ClusterResult
from neaptide.simulation.result import Percentiles, SimResult
from neaptide.simulation.simulator import Run

CLASSES = ("online", "offline")
BOUNDS = ("long_run", "window")
WIDTH = 100
NEVER_CUT = 1000
"""Wider than any table: a narrower terminal wraps lines, so that no number is cut."""


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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
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
    console = Console(width=NEVER_CUT)
    console.print(table, highlight=False)
    rows = result.rows
    console.print(
        f"router {result.router}, placement {result.placement}, {result.replica_hours:.2f} replica hours, "
        f"{result.failed_online} requests lost with their replica; offline rows: {rows.done} done, {rows.open} open, "
        f"{rows.given_back} leased again; {result.offline.deadline_misses} past their deadline",
        highlight=False,
    )


def show_comparison(runs: Sequence[tuple[str, Run]]) -> None:
    """Prints a table with one row per run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True, vertical="bottom")
    rows = [dict(_columns(run.result)) for _, run in runs]
    for column in rows[0]:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for (name, run), row in zip(runs, rows, strict=True):
        table.add_row(name if run.result.valid else f"{name}, NOT VALID", *row.values())
    console = Console(width=NEVER_CUT)
    console.print(_title(runs[0][1]), highlight=False)
    console.print(table, highlight=False)


def _title(run: Run) -> str:
    settings, (start_s, end_s) = run.result.settings, run.window_s
    bounds = run.result.offline.bound_tokens_per_s
    bound = " / ".join(_rate(bounds[name]) for name in BOUNDS)
    limit = "the rest of it" if settings.max_tokens is None else f"{settings.max_tokens:,}"
    return (
        f"{run.result.profile}, window {start_s:.1f} to {end_s:.1f} s, context {settings.max_model_len:,}, max_tokens "
        f"{limit}, TTFT {settings.ttft_slo_s:g} s, TPOT {1e3 * settings.tpot_slo_s:g} ms, noise "
        f"{settings.step_noise:.0%}, headroom {settings.headroom}\n"
        f"offline tok/s at most, all known: {bound} (long run / this window)"
    )


def _columns(result: SimResult) -> Iterator[tuple[str, str]]:
    """The compared figures, with one word per heading line."""
    online, offline, kv, settings = result.online, result.offline, result.kv, result.settings
    yield "tokens x slots", f"{settings.max_num_batched_tokens}x{settings.max_num_seqs}"
    yield "offline tok/s", _rate(offline.tokens_per_s)
    yield "of bound%", _bare(offline.share_of_bound)
    yield "computed tok/s", _rate(offline.computed_tokens_per_s)
    yield "attained% TTFT/TPOT/both", "/".join(_bare(online.attainment[name]) for name in ("ttft", "tpot", "both"))
    yield "from arrival%", _bare(online.attainment["both_from_arrival"])
    yield "TTFT ms p50/p99", _pair(online.ttft_s)
    yield "TPOT ms p50/p99", _pair(online.tpot_s)
    yield "gap ms p99/max", f"{_ms(online.itl_s['p99'])}/{_ms(online.longest_gap_s)}"
    yield "goodput req/s", "-" if online.goodput_rps is None else f"{online.goodput_rps:.2f}"
    yield "hits% on/off", f"{_bare(kv.online_hit_ratio)}/{_bare(kv.hit_ratio)}"
    yield "preempted on/off", "/".join(str(result.preemptions.count_by_class[name]) for name in CLASSES)
    yield "computed again", str(result.wasted_tokens)
    yield "longest wait s", "-" if offline.longest_wait_s is None else f"{offline.longest_wait_s:.0f}"


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
        yield "bound: long run / window", bounds
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
