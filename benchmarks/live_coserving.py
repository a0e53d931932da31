"""W5, live: online completions together with a batch file, through the HTTP server, client on the same machine.

It uses the 111M model, or another one (``--model``). Correctness is checked first. Each run has its own server:

1. The ceiling: offline work alone, lines of 256 tokens in / 64 out, submitted at once.
2. A probe of online work alone, without targets, which sets them: TPOT 2.4 times its TPOT p50, TTFT 5 times that, and
   at least 2 times its TTFT p50: where prompts are slow, 5 steps are less than a prompt takes alone.
   Online work is Poisson, 128 in / 32 out, streamed; its rate is ``load`` times the ceiling in logical tokens.
3. Online work alone, offline work alone with steps limited by the TPOT target, and both together.

share = offline tokens/s / (limited ceiling - online tokens/s); share_uncapped uses the ceiling itself.

The full form adds:

- both together at TPOT targets of 1.2, 1.8, 2.4, 3.6 and 4.8 times the TPOT of online work alone, which gives a curve
  of offline throughput over online latency;
- a simulation of the headline's run from its own step log (``--predict``);
- the same load under other policies on the same engine (``--rivals``), whose points should be below the curve. If one
  is beyond the end of the curve, ours runs again at the TPOT that this rival reached;
- all of that at loads 0.20, 0.10 and 0.40, and with arrivals in bursts (10 s on, 20 s off);
- with ``--vllm``, the same on vLLM's kernels: ours over its workers against its own priority scheduling, with default
  and with small limits.

    python -m benchmarks.live_coserving --quick             # 60 s per run, only load 0.20, no curve, rivals or repeat
    python -m benchmarks.live_coserving --medium            # 60 s per run, only load 0.20, three targets, two rivals
    python -m benchmarks.live_coserving --plot live.svg     # hours: 300 s per run, two repeats in turn

A run that is cut short (``--limit-min``, SIGINT, SIGTERM, a server that dies) prints and draws its results so far, and
exits with status 1. ``--plot`` draws every point, and ``--picture`` only the headline's load, small enough for a
README. ``--keep`` keeps step logs, from which ``benchmarks.live.late`` explains late chats. ``--from`` draws the result
of an earlier run.

Prints tables, then one JSON line. Its ratios are those of load 0.20, as means over the repeats. ``ttft_p99_vs_rival``
compares with the rival that has the lowest, ``offline_vs_rival`` with the best rival at an equal or better TPOT p50.
They are null if no rival ran, or none was as good.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import model_111m
from benchmarks.live import late
from benchmarks.live.engines import Engine, ours, over_vllm
from benchmarks.live.findings import Findings, from_json, jsonable
from benchmarks.live.measure import Experiment, measure
from benchmarks.live.plan import CEILING_LINES, PATIENCE_S, TPOT_OVER_ALONE, TTFT_OVER_ALONE, Case, Plan
from benchmarks.live.predict import print_prediction
from benchmarks.live.tables import print_curve, print_load
from neaptide.commands.outputs import check_plot
from neaptide.commands.server_process import ServerDiedError

LOADS = (0.20, 0.10, 0.40)
"""Fractions of the ceiling; the first is the headline."""
BURSTY = Case(0.20, "on-off")
OVER_ALONE = (1.2, 1.8, 2.4, 3.6, 4.8)
RIVALS = ("priority", "priority/16", "fcfs")
MEDIUM_OVER_ALONE = (1.2, 2.4, 4.8)
MEDIUM_RIVALS = ("priority", "fcfs")
QUICK, MEDIUM, LONG = (60.0, (10.0, 55.0)), (60.0, (8.0, 58.0)), (300.0, (20.0, 290.0))
"""Duration of a run, and the measured window in it, in seconds."""
MEDIUM_PATIENCE_S = 20.0
"""The default of two minutes after each run would be a tenth of the medium form's time, and would move no plotted
point."""


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="60 s per run instead of 300, only load 0.20, no repeat")
    form.add_argument("--medium", action="store_true", help="60 s per run, only load 0.20, three targets, two rivals")
    parser.add_argument(
        "--loads", type=numbers, metavar="A,B", help="fractions of the ceiling; the first is the headline"
    )
    parser.add_argument("--bursty", action=argparse.BooleanOptionalAction, help="also measure load 0.20 in bursts")
    parser.add_argument(
        "--targets", type=numbers, metavar="A,B", help="targets of the curve, in TPOT p50s of online work alone"
    )
    rivals_help = "other policies on our engine: POLICY[@STEP_TOKENS][/SLOTS][+SETTING=VALUE]"
    parser.add_argument("--rivals", type=words, metavar="P,P", help=rivals_help)
    alone_help = "least TTFT target, in TTFT p50s of online work alone (2; 0: always five TPOT targets)"
    parser.add_argument("--ttft-over-alone", type=float, default=TTFT_OVER_ALONE, metavar="X", help=alone_help)
    predict_help = "also simulate the headline's run from its own step log (on, except with --quick)"
    parser.add_argument("--predict", action=argparse.BooleanOptionalAction, help=predict_help)
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="interpreter with vLLM; also measure on vLLM's kernels"
    )
    parser.add_argument("--duration-s", type=float, help="duration of a run; the measured window scales with it")
    parser.add_argument("--repeats", type=int, help="number of repeats, in turn")
    parser.add_argument("--model", type=Path, metavar="DIR", help="model directory (the 111M model)")
    parser.add_argument(
        "--check-model", type=Path, metavar="DIR", help="model whose answers are checked (the same model)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device of our servers (a GPU if there is one)")
    lines_help = "offline lines of the first run; they must not run out"
    parser.add_argument("--ceiling-lines", type=int, default=CEILING_LINES, metavar="N", help=lines_help)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw every point, as .svg or .png")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw only the headline's load, for a README")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the last line there")
    parser.add_argument(
        "--keep", type=late.kept_in, metavar="DIR", help="keep the step logs of our runs at the headline's target"
    )
    parser.add_argument(
        "--limit-min", type=float, metavar="M", help="minutes after which it ends with the results so far"
    )
    parser.add_argument(
        "--from", type=Path, dest="earlier", metavar="FILE", help="measure nothing; draw the result of this file"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        for path in filter(None, (args.plot, args.picture)):
            check_plot(path)
        args.engines = engines_of(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def engines_of(args: argparse.Namespace) -> tuple[Engine, ...]:
    """The engines to compare. Raises ValueError for an invalid rival."""
    form: Sequence[str] = () if args.quick else MEDIUM_RIVALS if args.medium else RIVALS
    flags = [] if args.device is None else ["--device", args.device]
    engines = [ours(form if args.rivals is None else args.rivals, flags)]
    if args.vllm is not None:
        engines.append(over_vllm(args.vllm.absolute(), os.cpu_count() or 1, vllm_dtype()))
    return tuple(engines)


def vllm_dtype() -> str:
    """The dtype of both engines on vLLM's kernels: bfloat16, or float32 on a CPU that would emulate bfloat16."""
    import torch

    from neaptide.executors.torch.device import pick_dtype

    return str(pick_dtype("auto", "bfloat16", torch.device("cpu"))).removeprefix("torch.")


def experiment_of(args: argparse.Namespace) -> Experiment:
    is_short = args.quick or args.medium
    cases = [Case(load) for load in args.loads or (LOADS[:1] if is_short else LOADS)]
    if args.bursty if args.bursty is not None else not is_short:
        cases.append(BURSTY)
    form = (TPOT_OVER_ALONE,) if args.quick else MEDIUM_OVER_ALONE if args.medium else OVER_ALONE
    return Experiment(
        tuple(cases),
        args.repeats or (1 if is_short else 2),
        args.engines,
        args.targets or form,
        args.ttft_over_alone,
        not args.quick if args.predict is None else args.predict,
        caps_every_engine=not args.medium,
        kept_in=args.keep,
        check_model=args.check_model,
    )


def plan_of(args: argparse.Namespace, model: Path) -> Plan:
    duration_s, window_s = QUICK if args.quick else MEDIUM if args.medium else LONG
    if args.duration_s is not None:
        scale = args.duration_s / duration_s
        duration_s, window_s = args.duration_s, (window_s[0] * scale, window_s[1] * scale)
    patience_s = MEDIUM_PATIENCE_S if args.medium else PATIENCE_S
    return Plan(duration_s, window_s, model, args.seed, args.ceiling_lines, patience_s=patience_s)


async def measure_until_cut(
    plan: Plan, experiment: Experiment, findings: Findings, limit_s: float | None
) -> str | None:
    """Measures; returns the reason if the run was cut short. ``findings`` has what was measured until then."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        async with asyncio.timeout(limit_s):
            await measure(plan, experiment, findings)
    except TimeoutError:
        return "time limit"
    except asyncio.CancelledError:
        task.uncancel()
        return "stop signal"
    except (SystemExit, ServerDiedError, httpx.HTTPError) as error:
        return str(error) or type(error).__name__
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return None


def show(figures: Mapping[str, Any]) -> None:
    for load in figures["loads"]:
        print_load(load)
        if "prediction" in load:
            print_prediction(load["prediction"])
    for curve in figures.get("curves", ()):
        print_curve(curve)


def draw_plots(figures: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Draws the plots, if there is a curve."""
    curves = figures.get("curves")
    if not curves:
        return
    if args.plot is not None:
        from benchmarks.live.plot import draw

        draw(curves, args.plot)
    if args.picture is not None:
        from benchmarks.live.picture import draw_picture

        draw_picture(curves, args.picture)


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    if args.earlier is not None:
        draw_plots(from_json(json.loads(args.earlier.read_text())), args)
        return 0
    plan, experiment = plan_of(args, args.model or model_111m()), experiment_of(args)
    findings, limit_s = Findings(plan.window_s, experiment.has_curve), 60.0 * args.limit_min if args.limit_min else None
    cut_short: str | None = "error"
    try:
        cut_short = asyncio.run(measure_until_cut(plan, experiment, findings, limit_s))
    finally:  # an error of this program also keeps the results
        figures = findings.to_figures() | {"cut_short": cut_short}
        show(figures)
        draw_plots(figures, args)
        line = json.dumps(jsonable(figures), allow_nan=False)
        if args.json is not None:
            args.json.write_text(line + "\n")
        print(f"cut short: {cut_short}" if cut_short else "", end="\n" if cut_short else "")
        print(line)
    return 1 if cut_short else 0


if __name__ == "__main__":
    sys.exit(main())
