"""``neaptide simulate``: a policy on a device profile under recorded or generated load, on a virtual clock."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from neaptide.commands.simulate_tables import show_comparison, show_run
from neaptide.estimator.device_profile import load_profile
from neaptide.estimator.recipes import DEFAULT_HEADROOM, HEADROOM_KINDS
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import delayed
from neaptide.simulation.chrome_trace import write_chrome_trace
from neaptide.simulation.explain import Explainer
from neaptide.simulation.points import parse_points
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import OnProgress, Run, SimulationError, simulate

OF_ONE_RUN = ("step_log", "chrome_trace", "explain")
"""Flags that look into a single run."""
MAX_NOISE = 1.0
"""Steps that take e times as long as others, as a rule, are no machine's."""
MAX_PLANNING_SCALE = 1000.0


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("simulate", help="run policies on a virtual clock and a device profile")
    add = parser.add_argument
    policy_help = "scheduling policy; several: a,b@1536,c@2048x512, with step tokens and seats of their own (neaptide)"
    add("--policy", default="neaptide", metavar="P", help=policy_help)
    add("--online", default="none", metavar="TRACE", help="a trace or synthetic online set, a trace file, or none")
    add("--online-window", metavar="A:B", help="seconds of the trace, before --speed (all)")
    add("--speed", type=float, default=1.0, metavar="X", help="arrival times are divided by it (1)")
    add("--warm-up-s", type=float, default=0.0, metavar="X", help="offline work alone, before the first arrival (0)")
    add("--offline", nargs="+", default=["none"], metavar="FILE", help="offline sets, OpenAI batch files, or none")
    add("--keep-order", action="store_true", help="do not shuffle the offline requests")
    add("--profile", default="h100-80g-llama-3.1-8b", metavar="NAME", help="device profile, by name or file")
    add("--ttft-slo-s", type=float, default=1.0, metavar="X", help="target of the first token (1)")
    add("--tpot-slo-s", type=float, default=0.05, metavar="X", help="target of further tokens (0.05)")
    _add_limits(parser)
    add("--seed", type=int, default=0, metavar="N")
    add("--json", type=Path, metavar="OUT", help="also write the result to this file")
    add("--step-log", type=Path, metavar="OUT", help="write every decision, for replay; .gz compresses")
    add("--chrome-trace", type=Path, metavar="OUT", help="write a trace for chrome://tracing or Perfetto")
    add("--explain", type=int, metavar="STEP", help="print what this step held, and why")
    parser.set_defaults(func=run_command)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Of the device and the engine."""
    add = parser.add_argument
    add("--overlap-kappa", type=float, default=1.0, metavar="K", help="1: compute and memory do not overlap (1)")
    add("--overlap-depth", type=int, default=0, choices=(0, 1), help="steps in flight while the next is planned (0)")
    add("--block-size", type=int, default=16, metavar="N", help="tokens per KV block (16)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="requests that hold KV at once, at most (256)")
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens of a step at most (2048)")
    add("--max-tokens", type=int, metavar="N", help="what clients ask for at most (the rest of the context)")
    add("--max-model-len", type=int, default=131_072, metavar="N", help="context: prompt and output (131072)")
    add("--noise", type=float, default=0.0, metavar="X", help="deviation of the logarithm of step times (0)")
    planning_help = "planning takes so many times what the profile says; 0: no time (1)"
    add("--planning-scale", type=float, default=1.0, metavar="X", help=planning_help)
    headroom_help = f"forecast of online memory demand: {', '.join(HEADROOM_KINDS)} ({DEFAULT_HEADROOM})"
    add("--headroom", default=DEFAULT_HEADROOM, choices=HEADROOM_KINDS, metavar="NAME", help=headroom_help)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, or 2 if the command cannot be carried out."""
    try:
        for path in (args.json, args.chrome_trace):
            if path is not None:
                path.touch()  # what cannot be written is told before the run, not after it
        points = parse_points(args.policy)
        scenario = _scenario(args)
        if len(points) == 1:
            return _run_one(points[0].of(scenario), args)
        if any(getattr(args, name) is not None for name in OF_ONE_RUN):
            raise ValueError("--step-log, --chrome-trace and --explain look into one run: name one policy")
        scenarios = {str(point): point.of(scenario) for point in points}
        if scenario.online and scenario.offline:
            scenarios |= {f"{points[0]}, online alone": replace(points[0].of(scenario), offline=())}
        return _run_several(scenarios, args)
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, SimulationError) as error:
        return _refuse(str(error))


def _run_one(scenario: Scenario, args: argparse.Namespace) -> int:
    explainer = Explainer(args.explain) if args.explain is not None else None
    run = _simulate(scenario, args, explainer)
    line = run.result.to_json()
    if args.json is not None:
        args.json.write_bytes(line + b"\n")
    _warn(run, scenario)
    if explainer is not None:
        print(explainer.text or f"there is no step {args.explain}: the run had {run.result.steps}")
    show_run(run)
    print(line.decode())
    return 0


def _run_several(scenarios: dict[str, Scenario], args: argparse.Namespace) -> int:
    """One after another, by the names that they have in the table."""
    runs: list[tuple[str, Run]] = []
    for number, (name, scenario) in enumerate(scenarios.items(), 1):
        with _progress(f"{name} ({number} of {len(scenarios)})", says_so=True) as on_progress:
            runs.append((name, simulate(scenario, on_progress=on_progress)))
        _warn(runs[-1][1], scenario, name)
    found: list[dict[str, Any]] = [{"name": name} | msgspec.to_builtins(run.result) for name, run in runs]
    line = json.dumps(found, allow_nan=False)
    if args.json is not None:
        args.json.write_text(line + "\n", encoding="utf-8")
    show_comparison(runs)
    print(line)
    return 0


def _scenario(args: argparse.Namespace) -> Scenario:
    for name in ("speed", "ttft_slo_s", "tpot_slo_s", "block_size"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive")
    for name in ("max_tokens", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    if not 0.0 <= args.warm_up_s < math.inf:
        raise ValueError("--warm-up-s must be at least 0")
    if not 0.0 <= args.noise < MAX_NOISE:
        raise ValueError(f"--noise must be at least 0 and below {MAX_NOISE:g}")
    if not 0.0 <= args.planning_scale < MAX_PLANNING_SCALE:
        raise ValueError(f"--planning-scale must be at least 0 and below {MAX_PLANNING_SCALE:g}")
    if "none" in args.offline and len(args.offline) > 1:
        raise ValueError("--offline none stands alone")
    online = []
    if args.online != "none":
        window_s = _window(args.online_window)
        online = delayed(online_requests(args.online, args.seed, window_s=window_s, speed=args.speed), args.warm_up_s)
        if not online:
            raise ValueError(f"no request of {args.online} lies in the window")
    elif args.online_window is not None:
        raise ValueError("--online-window needs --online")
    offline = [load_offline(spec, args.seed, args.keep_order) for spec in args.offline if spec != "none"]
    return Scenario(
        profile=load_profile(args.profile),
        online=online,
        offline=offline,
        ttft_slo_s=args.ttft_slo_s,
        tpot_slo_s=args.tpot_slo_s,
        overlap_kappa=args.overlap_kappa,
        overlap_depth=args.overlap_depth,
        planning_scale=args.planning_scale,
        block_size=args.block_size,
        seed=args.seed,
        keep_order=args.keep_order,
        step_noise=args.noise,
        headroom=args.headroom,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
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
    with TemporaryDirectory(prefix="neaptide-steps-") as directory, _progress("simulating") as on_progress:
        log: Path | None = args.step_log
        if args.chrome_trace is not None and log is None:
            log = Path(directory, "steps.jsonl")
        run = simulate(scenario, step_log=log, observers=[explainer] if explainer else [], on_progress=on_progress)
        if args.chrome_trace is not None and log is not None:
            write_chrome_trace(log, args.chrome_trace)
    return run


@contextmanager
def _progress(name: str, *, says_so: bool = False) -> Iterator[OnProgress | None]:
    """A bar on stderr, if that is a terminal; elsewhere a line if it ``says_so``."""
    console = Console(stderr=True)
    if not console.is_terminal:
        if says_so:
            print(name, file=sys.stderr, flush=True)
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _refuse(message: str) -> int:
    print(f"neaptide simulate: {message}", file=sys.stderr)
    return 2


def _warn(run: Run, scenario: Scenario, name: str | None = None) -> None:
    """``name`` tells several runs apart."""
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
        print(f"neaptide simulate: {name}: {note}" if name else f"neaptide simulate: {note}", file=sys.stderr)
