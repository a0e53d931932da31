"""``neaptide simulate``: policies on a device profile under recorded or synthetic load, on a virtual clock."""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.cluster.simulation.fleet import SimulatedFleet
from neaptide.commands.outputs import JSON_HELP, check_plot, check_writable, draw, print_json, write_json
from neaptide.commands.simulate_plot import plot_runs
from neaptide.commands.simulate_tables import short_names, show_comparison, show_replicas, show_run
from neaptide.commands.simulation_flags import (
    DEFAULT_PROFILE,
    add_fleet,
    add_limits,
    add_load,
    check_flags,
    fleet_of,
    offline_of,
    online_of,
    profile_help,
    progress,
    scenario_of,
)
from neaptide.engine.offline.planning.plan import ORDERS, find_order
from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.engine.scheduler.parts import PARTS
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.traces import delayed
from neaptide.simulation.chrome_trace import write_chrome_trace
from neaptide.simulation.explain import Explainer
from neaptide.simulation.points import parse_points
from neaptide.simulation.replica import SimulationError
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import Run, simulate

OF_ONE_RUN = ("step_log", "chrome_trace", "explain")
"""Flags that inspect a single run."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("simulate", help="simulate a scheduling policy on recorded traffic; needs no GPU")
    add = parser.add_argument
    policy_help = (
        "scheduling policy, or several with commas; NAME@1536 and NAME@2048x512 set step tokens and slots (neaptide)"
    )
    add("--policy", default="neaptide", metavar="P", help=policy_help)
    without_help = f"disable parts of the policy neaptide: {', '.join(PARTS)}"
    add("--without", default="", metavar="PART,...", help=without_help)
    plan_help = (
        f"order of the offline pool, planned outside the engine: {', '.join((*ORDERS, DUAL_SCAN))}, or another "
        "package's (the policy's own)"
    )
    add("--plan", metavar="ORDER", help=plan_help)
    add_load(parser)
    arrivals_help = (
        "submit this many rows of each set per interval, or recorded: at the trace file's times (all at once)"
    )
    add("--offline-arrivals", metavar="ROWS@SECONDS", help=arrivals_help)
    add(
        "--warm-up-s",
        type=float,
        default=0.0,
        metavar="X",
        help="seconds of offline work alone before the first online request (0)",
    )
    add("--profile", default=DEFAULT_PROFILE, metavar="NAME", help=profile_help("device profile, by name or file"))
    add_limits(parser)
    add_fleet(parser)
    add("--json", type=Path, metavar="OUT", help=JSON_HELP)
    plot_help = "draw offline work and the chats' waits of every policy (.png, .pdf, .svg); needs matplotlib"
    add("--plot", type=Path, metavar="OUT.png", help=plot_help)
    add("--step-log", type=Path, metavar="OUT", help="write every scheduling decision, for replay; .gz compresses")
    add("--chrome-trace", type=Path, metavar="OUT", help="write a trace for chrome://tracing or Perfetto")
    add("--explain", type=int, metavar="STEP", help="print what this step computed, and why")
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, or 2 if the command fails."""
    try:
        for path in (args.json, args.step_log, args.chrome_trace):
            if path is not None:
                check_writable(path)
        if args.plot is not None:
            check_plot(args.plot)
        points = parse_points(args.policy)
        scenario, fleet = _scenario(args), fleet_of(args)
        looks_inside = any(getattr(args, name) is not None for name in OF_ONE_RUN)
        if fleet is not None and looks_inside:
            raise ValueError("--step-log, --chrome-trace and --explain inspect one engine: use them with --replicas 1")
        if len(points) == 1 and fleet is not None:
            return _run_cluster(points[0].of(scenario), fleet, args)
        if len(points) == 1:
            return _run_one(points[0].of(scenario), args)
        if looks_inside:
            raise ValueError("--step-log, --chrome-trace and --explain inspect one run: use them with one policy")
        scenarios = {str(point): point.of(scenario) for point in points}
        if scenario.online and scenario.offline:
            scenarios |= {f"{points[0]}, online alone": replace(points[0].of(scenario), offline=())}
        return _run_several(scenarios, fleet, args)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, SimulationError) as error:
        return _refuse(str(error))


def _run_one(scenario: Scenario, args: argparse.Namespace) -> int:
    explainer = Explainer(args.explain) if args.explain is not None else None
    run = _simulate(scenario, args, explainer)
    line = run.result.to_json().decode()
    write_json(line, args.json)
    _warn(run, scenario)
    if explainer is not None:
        print(explainer.text or f"there is no step {args.explain}: the run had {run.result.steps}")
    show_run(run)
    _draw([(scenario.policy, run)], args)
    print_json(line, args.json)
    return 0


def _run_cluster(scenario: Scenario, fleet: SimulatedFleet, args: argparse.Namespace) -> int:
    with progress("simulating") as on_progress:
        run = simulate_cluster(scenario, fleet, on_progress=on_progress)
    line = run.result.to_json().decode()
    write_json(line, args.json)
    _warn(run.whole, scenario)
    show_run(run.whole)
    show_replicas(run.result)
    _draw([(scenario.policy, run.whole)], args)
    print_json(line, args.json)
    return 0


def _run_several(scenarios: dict[str, Scenario], fleet: SimulatedFleet | None, args: argparse.Namespace) -> int:
    """Runs the scenarios one by one, under their names in the table."""
    runs: list[tuple[str, Run]] = []
    for number, (name, scenario) in enumerate(scenarios.items(), 1):
        with progress(f"{name} ({number} of {len(scenarios)})", says_so=True) as on_progress:
            if fleet is None:
                run = simulate(scenario, on_progress=on_progress)
            else:
                run = simulate_cluster(scenario, fleet, on_progress=on_progress).whole
            runs.append((name, run))
        _warn(runs[-1][1], scenario, name)
    found: list[dict[str, Any]] = [{"name": name} | msgspec.to_builtins(run.result) for name, run in runs]
    line = json.dumps(found, allow_nan=False)
    write_json(line, args.json)
    named = list(zip(short_names([name for name, _ in runs]), (run for _, run in runs), strict=True))
    show_comparison(named)
    _draw(named, args)
    print_json(line, args.json)
    return 0


def _draw(runs: list[tuple[str, Run]], args: argparse.Namespace) -> None:
    if args.plot is not None:
        draw(lambda figure: plot_runs(figure, runs), args.plot)


def _scenario(args: argparse.Namespace) -> Scenario:
    check_flags(args)
    if args.plan not in (None, DUAL_SCAN):
        find_order(args.plan)
    if not 0.0 <= args.warm_up_s < math.inf:
        raise ValueError("--warm-up-s must be at least 0")
    online = delayed(online_of(args), args.warm_up_s)
    left_out = tuple(part for part in args.without.split(",") if part)
    offline = offline_of(args, args.offline_arrivals)
    scenario = scenario_of(args, load_profile(args.profile), online, offline)
    if args.deadline_s is not None:
        if not 0.0 < args.deadline_s < math.inf:
            raise ValueError("--deadline-s must be positive")
        scenario = replace(scenario, offline_deadline_s=args.deadline_s)
    return replace(scenario, left_out=left_out, plan=args.plan)


def _simulate(scenario: Scenario, args: argparse.Namespace, explainer: Explainer | None) -> Run:
    with TemporaryDirectory(prefix="neaptide-steps-") as directory, progress("simulating") as on_progress:
        log: Path | None = args.step_log
        if args.chrome_trace is not None and log is None:
            log = Path(directory, "steps.jsonl")
        run = simulate(scenario, step_log=log, observers=[explainer] if explainer else [], on_progress=on_progress)
        if args.chrome_trace is not None and log is not None:
            write_chrome_trace(log, args.chrome_trace)
    return run


def _refuse(message: str) -> int:
    print(f"neaptide simulate: {message}", file=sys.stderr)
    return 2


def _warn(run: Run, scenario: Scenario, name: str | None = None) -> None:
    """Prints warnings about a run; ``name`` distinguishes several runs."""
    notes = []
    if run.dry_s is not None:
        notes.append(
            f"the offline pool ran out of work at {run.dry_s:.1f} s, inside the window: the result is not valid"
        )
    if run.num_left_out:
        notes.append(f"{run.num_left_out} requests exceed {scenario.max_tokens} tokens and are skipped")
    if run.num_cut:
        notes.append(f"{run.num_cut} requests have more output than the limit and are truncated")
    if run.num_unfinished:
        notes.append(f"{run.num_unfinished} online requests were not finished; they count as missed")
    if run.num_failed:
        notes.append(f"{run.num_failed} offline requests failed in the engine")
    for note in notes:
        print(f"neaptide simulate: {name}: {note}" if name else f"neaptide simulate: {note}", file=sys.stderr)
