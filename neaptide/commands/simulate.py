"""``neaptide simulate``: a policy on a device profile under recorded or generated load, on a virtual clock."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from neaptide.engine.scheduler.policies import POLICIES
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.simulation.chrome_trace import write_chrome_trace
from neaptide.simulation.explain import Explainer
from neaptide.simulation.result import Percentiles, SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress, Run, SimulationError, simulate

TABLE_WIDTH = 100


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("simulate", help="run a policy on a virtual clock and a device profile")
    add = parser.add_argument
    add("--policy", default="neaptide", metavar="P", help="scheduling policy (neaptide)")
    add("--online", default="none", metavar="TRACE", help="a trace or synthetic online set, a trace file, or none")
    add("--online-window", metavar="A:B", help="seconds of the trace, before --speed (all)")
    add("--speed", type=float, default=1.0, metavar="X", help="arrival times are divided by it (1)")
    add("--offline", nargs="+", default=["none"], metavar="FILE", help="offline sets, OpenAI batch files, or none")
    add("--keep-order", action="store_true", help="do not shuffle the offline requests")
    add("--profile", default="h100-80g-llama-3.1-8b", metavar="NAME", help="device profile, by name or file")
    add("--ttft-slo-s", type=float, default=1.0, metavar="X", help="target of the first token (1)")
    add("--tpot-slo-s", type=float, default=0.05, metavar="X", help="target of further tokens (0.05)")
    add("--overlap-kappa", type=float, default=1.0, metavar="K", help="1: compute and memory do not overlap (1)")
    add("--overlap-depth", type=int, default=0, choices=(0, 1), help="steps in flight while the next is planned (0)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens per KV block (16)")
    add("--max-tokens", type=int, metavar="N", help="what clients ask for at most (the rest of the context)")
    add("--max-model-len", type=int, default=131_072, metavar="N", help="context: prompt and output (131072)")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", type=Path, metavar="OUT", help="also write the result to this file")
    add("--step-log", type=Path, metavar="OUT", help="write every decision, for replay; .gz compresses")
    add("--chrome-trace", type=Path, metavar="OUT", help="write a trace for chrome://tracing or Perfetto")
    add("--explain", type=int, metavar="STEP", help="print what this step held, and why")
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, or 2 if the command cannot be carried out."""
    try:
        for path in (args.json, args.chrome_trace):
            if path is not None:
                path.touch()  # what cannot be written is told before the run, not after it
        scenario = _scenario(args)
        explainer = Explainer(args.explain) if args.explain is not None else None
        run = _simulate(scenario, args, explainer)
        if args.json is not None:
            args.json.write_bytes(run.result.to_json() + b"\n")
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, SimulationError) as error:
        return _refuse(str(error))
    _warn(run, scenario)
    if explainer is not None:
        print(explainer.text or f"there is no step {args.explain}: the run had {run.result.steps}")
    _show(run)
    print(run.result.to_json().decode())
    return 0


def _scenario(args: argparse.Namespace) -> Scenario:
    if args.policy not in POLICIES:
        raise ValueError(f"there is no policy {args.policy!r}; there are: {', '.join(sorted(POLICIES))}")
    for name in ("speed", "ttft_slo_s", "tpot_slo_s", "block_size"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    for name in ("max_tokens", "max_model_len"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if "none" in args.offline and len(args.offline) > 1:
        raise ValueError("--offline none stands alone")
    online = []
    if args.online != "none":
        window_s = _window(args.online_window)
        online = online_requests(args.online, args.seed, window_s=window_s, speed=args.speed)
        if not online:
            raise ValueError(f"no request of {args.online} lies in the window")
    elif args.online_window is not None:
        raise ValueError("--online-window needs --online")
    offline = [load_offline(spec, args.seed, args.keep_order) for spec in args.offline if spec != "none"]
    return Scenario(
        profile=load_profile(args.profile),
        online=online,
        offline=offline,
        policy=args.policy,
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        overlap_kappa=args.overlap_kappa,
        overlap_depth=args.overlap_depth,
        block_size=args.block_size,
        seed=args.seed,
        keep_order=args.keep_order,
        max_model_len=args.max_model_len,
        max_output_tokens=args.max_tokens,
    )


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    start, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(start), float(end)
    except ValueError:
        raise ValueError(f"--online-window is two numbers A:B in seconds, not {text!r}") from None


def _simulate(scenario: Scenario, args: argparse.Namespace, explainer: Explainer | None) -> Run:
    with TemporaryDirectory(prefix="neaptide-steps-") as directory, _progress() as on_progress:
        log: Path | None = args.step_log
        if args.chrome_trace is not None and log is None:
            log = Path(directory, "steps.jsonl")
        run = simulate(scenario, step_log=log, observers=[explainer] if explainer else [], on_progress=on_progress)
        if args.chrome_trace is not None and log is not None:
            write_chrome_trace(log, args.chrome_trace)
    return run


@contextmanager
def _progress() -> Iterator[OnProgress | None]:
    """A bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("simulating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating")
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _refuse(message: str) -> int:
    print(f"neaptide simulate: {message}", file=sys.stderr)
    return 2


def _warn(run: Run, scenario: Scenario) -> None:
    notes = []
    if run.dry_s is not None:
        notes.append(f"the offline pool ran dry at {run.dry_s:.1f} s, inside the window: the result is not valid")
    if run.num_left_out:
        notes.append(f"{run.num_left_out} requests do not fit into {scenario.max_tokens} tokens and are left out")
    if run.num_cut:
        notes.append(f"{run.num_cut} requests have more output than they may ask for and are cut there")
    if run.num_unfinished:
        notes.append(f"{run.num_unfinished} online requests were not finished; they count as missed")
    if run.num_failed:
        notes.append(f"{run.num_failed} offline requests failed in the engine")
    for note in notes:
        print(f"neaptide simulate: {note}", file=sys.stderr)


def _show(run: Run) -> None:
    result = run.result
    start_s, end_s = run.window_s
    console = Console(width=TABLE_WIDTH)
    window = f"window {start_s:.1f} to {end_s:.1f} s"
    console.print(f"{result.policy} on {result.profile}, {window}, {result.steps} steps", highlight=False)
    table = Table(show_header=False)
    for name, value in _rows(result):
        table.add_row(name, value)
    console.print(table)


def _rows(result: SimResult) -> Iterator[tuple[str, str]]:
    online, offline, kv = result.online, result.offline, result.kv
    if online.requests:
        yield "online requests", str(online.requests)
        yield "TTFT p50 / p90 / p99", _milliseconds(online.ttft_s)
        yield "TPOT p50 / p90 / p99", _milliseconds(online.tpot_s)
        yield "gap p50 / p90 / p99", _milliseconds(online.itl_s)
        shares = " / ".join(_percent(online.attainment[name]) for name in ("ttft", "tpot", "both"))
        yield "attained TTFT / TPOT / both", shares
        if online.goodput_rps is not None:
            yield "goodput", f"{online.goodput_rps:.2f} requests/s"
    if kv.saving_ratio_bound is not None:
        yield "offline requests completed", str(offline.requests_completed)
        yield "offline tokens/s, logical", _rate(offline.tokens_per_s)
        yield "of these output", _rate(offline.output_tokens_per_s)
        yield "offline tokens/s, computed", _rate(offline.computed_tokens_per_s)
        if offline.makespan_s is not None:
            yield "makespan", f"{offline.makespan_s:.1f} s"
        shares = " / ".join(_percent(x) for x in (kv.hit_ratio, kv.saving_ratio, kv.saving_ratio_bound))
        yield "prefix hits / saving / its bound", shares
    occupancy = kv.occupancy_by_class
    yield "KV online / offline / cached", " / ".join(_percent(occupancy[k]) for k in ("online", "offline", "cached"))
    yield "preemptions", str(sum(result.preemptions.count_by_kind.values()))
    yield "tokens computed again", str(result.wasted_tokens)
    prediction = result.prediction
    yield "step prediction: error / covered", f"{_percent(prediction['mape'])} / {_percent(prediction['coverage'])}"
    mean_ms, p99_ms = result.scheduler_ms["mean"], result.scheduler_ms["p99"]
    if mean_ms is not None and p99_ms is not None:
        yield "planning, mean / p99", f"{mean_ms:.2f} / {p99_ms:.2f} ms"
    yield "simulated in", f"{result.wall_s:.1f} s, {result.peak_memory_bytes / 2**20:.0f} MiB"
    if not result.valid:
        yield "NOT VALID", "the offline pool ran dry inside the window"


def _milliseconds(values: Percentiles) -> str:
    return " / ".join("-" if value is None else f"{1e3 * value:.0f}" for value in values.values()) + " ms"


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
