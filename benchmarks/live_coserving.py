"""W5, live: real-time completions beside a batch file, through the HTTP server, client on the same machine.

The 111M model, or another (``--model``). First the ceiling: offline work alone, lines of 256 tokens in / 64 out,
submitted at once. Online: Poisson, 128 in / 32 out, streamed, at the rate that makes ``load`` of the ceiling in logical
tokens. A probe of online alone with lax targets sets them: TPOT 2.4 times its TPOT p50, TTFT 5 times that. Then online
alone, offline alone with steps capped at the TPOT target, and both together. A server for each run; correctness is
checked first.

share = offline tokens/s / (capped ceiling - online tokens/s); share_uncapped with the ceiling itself.

The whole form also runs both together at TPOT targets of 1.2, 1.8, 2.4, 3.6 and 4.8 times online alone, which is a
curve of offline throughput against online latency; simulates the headline's run from its own step log (``--predict``);
and runs the same load under other policies (``--rivals``) on the same engine, points that should stand below the curve.
Where one stands beyond its end, ours runs once more at what that rival's streams got.
All that at loads 0.20, 0.10 and 0.40, and with arrivals in bursts (10 s on, 20 s off). With ``--vllm`` the same on
vLLM's kernels: ours over its workers against its own priority scheduling at default and at small limits. ``--plot``
draws every point.

    python -m benchmarks.live_coserving --quick             # 60 s a run, load 0.20 only, no curve, no rivals, no repeat
    python -m benchmarks.live_coserving --medium            # 60 s a run, load 0.20 only, three targets, two rivals
    python -m benchmarks.live_coserving --plot live.svg     # hours: 300 s a run, two repeats by turns

What ends before its end (``--limit-min``, SIGINT, SIGTERM, a server that dies) prints and draws what it has; the exit
status is then 1. ``--keep`` keeps step logs, from which ``benchmarks.live.late`` tells why chats were late.
``--picture`` draws the headline's load alone, small enough for a README; ``--from`` draws the line of an earlier run
again.

Prints tables, then one JSON line; its ratios are those of load 0.20, means over the repeats. ``ttft_p99_vs_rival`` is
against the rival with the lowest, ``offline_vs_rival`` against the most that a rival did at an equal or better TPOT
p50; null where no rival ran, or none was as good.
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
from benchmarks.live.plan import CEILING_LINES, PATIENCE_S, TPOT_OVER_ALONE, Case, Plan
from benchmarks.live.predict import print_prediction
from benchmarks.live.tables import print_curve, print_load
from neaptide.commands.outputs import check_plot
from neaptide.commands.server_process import ServerDiedError

LOADS = (0.20, 0.10, 0.40)
"""Of the ceiling; the first is the headline."""
BURSTY = Case(0.20, "on-off")
OVER_ALONE = (1.2, 1.8, 2.4, 3.6, 4.8)
RIVALS = ("priority", "priority/16", "fcfs")
MEDIUM_OVER_ALONE = (1.2, 2.4, 4.8)
MEDIUM_RIVALS = ("priority", "fcfs")
QUICK, MEDIUM, LONG = (60.0, (10.0, 55.0)), (60.0, (8.0, 58.0)), (300.0, (20.0, 290.0))
"""Seconds of a run, and the window in it that is measured."""
MEDIUM_PATIENCE_S = 20.0
"""Two minutes behind each flood are a tenth of the medium form's time, and move no point that is on the plot."""


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="60 s a run instead of 300, load 0.20 only, no repeat")
    form.add_argument("--medium", action="store_true", help="60 s a run, load 0.20 only, three targets, two rivals")
    parser.add_argument("--loads", type=numbers, metavar="A,B", help="of the ceiling; the first is the headline")
    parser.add_argument("--bursty", action=argparse.BooleanOptionalAction, help="also load 0.20 in bursts")
    parser.add_argument("--targets", type=numbers, metavar="A,B", help="of the curve, in TPOT p50s of online alone")
    rivals_help = "POLICY[@STEP_TOKENS][/SEATS][+SETTING=VALUE], on our engine"
    parser.add_argument("--rivals", type=words, metavar="P,P", help=rivals_help)
    alone_help = (
        "the TTFT target is so many TTFT p50s of online alone at least (0: five TPOT targets, whatever that is)"
    )
    parser.add_argument("--ttft-over-alone", type=float, default=0.0, metavar="X", help=alone_help)
    predict_help = "also simulate the headline's run from its own step log (all forms but --quick do)"
    parser.add_argument("--predict", action=argparse.BooleanOptionalAction, help=predict_help)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="also on vLLM's kernels, by this interpreter")
    parser.add_argument("--duration-s", type=float, help="of a run, with the same parts of it measured")
    parser.add_argument("--repeats", type=int, help="by turns")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the 111M model unless given")
    parser.add_argument("--check-model", type=Path, metavar="DIR", help="whose texts are checked, in place of its own")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of our servers; by default a GPU if there is one")
    lines_help = "of the first run; must not run out"
    parser.add_argument("--ceiling-lines", type=int, default=CEILING_LINES, metavar="N", help=lines_help)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="every point, as .svg or .png")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the headline's load alone, for a README")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the last line, also there")
    parser.add_argument(
        "--keep", type=late.kept_in, metavar="DIR", help="for the step logs of our runs at the headline's target"
    )
    parser.add_argument("--limit-min", type=float, metavar="M", help="minutes after which it ends with what it has")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="measure nothing: draw this line")
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
    """Raises ValueError for a rival that is none."""
    form: Sequence[str] = () if args.quick else MEDIUM_RIVALS if args.medium else RIVALS
    flags = [] if args.device is None else ["--device", args.device]
    engines = [ours(form if args.rivals is None else args.rivals, flags)]
    if args.vllm is not None:
        engines.append(over_vllm(args.vllm.absolute(), os.cpu_count() or 1, vllm_dtype()))
    return tuple(engines)


def vllm_dtype() -> str:
    """What both engines on vLLM's kernels compute in: bfloat16, or float32 on a CPU that would emulate it."""
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
    """Why it ended before its end, if it did; ``findings`` has what was measured until then."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        async with asyncio.timeout(limit_s):
            await measure(plan, experiment, findings)
    except TimeoutError:
        return "its time was over"
    except asyncio.CancelledError:
        task.uncancel()
        return "it was told to end"
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
    """As far as there is a curve."""
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
    cut_short: str | None = "it failed"
    try:
        cut_short = asyncio.run(measure_until_cut(plan, experiment, findings, limit_s))
    finally:  # a fault of ours also leaves what was measured
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
