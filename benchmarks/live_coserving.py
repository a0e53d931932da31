"""W5, live: real-time completions beside a batch file, through the HTTP server, client on the same machine.

The 111M model. First the ceiling: offline work alone, lines of 256 tokens in / 64 out, submitted at once. Online:
Poisson, 128 in / 32 out, streamed, at the rate that makes ``load`` of the ceiling in logical tokens. A probe of online
alone with lax targets sets them: TPOT 2.4 times its TPOT p50, TTFT 5 times that. Then online alone, offline alone with
steps capped at the TPOT target, and both together. A server for each run; correctness is checked first.

share = offline tokens/s / (capped ceiling - online tokens/s); share_uncapped with the ceiling itself.

The whole form also runs both together at TPOT targets of 1.2, 1.8, 2.4, 3.6 and 4.8 times online alone, which is a
curve of offline throughput against online latency; simulates the headline's run from its own step log (``--predict``);
and runs the same load under other policies (``--rivals``) on the same engine, points that should stand below the curve.
All that at loads 0.20, 0.10 and 0.40, and with arrivals in bursts (10 s on, 20 s off). With ``--vllm`` the same on
vLLM's kernels: ours over its workers against its own priority scheduling at default and at small limits. ``--plot``
draws every point.

    python -m benchmarks.live_coserving --quick             # 60 s a run, load 0.20 only, no curve, no rivals, no repeat
    python -m benchmarks.live_coserving --medium            # 75 s a run, load 0.20 only, three targets, two rivals
    python -m benchmarks.live_coserving --plot live.svg     # hours: 300 s a run, two repeats by turns

Prints tables, then one JSON line; its ratios are those of load 0.20, means over the repeats. ``ttft_p99_vs_rival`` is
against the rival with the lowest, ``offline_vs_rival`` against the most that a rival did at an equal or better TPOT
p50; null where no rival ran, or none was as good.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import model_111m
from benchmarks.live.engines import Engine, ours, over_vllm
from benchmarks.live.measure import Case, Experiment, jsonable, measure
from benchmarks.live.plan import TPOT_OVER_ALONE, Plan
from benchmarks.live.predict import print_prediction
from benchmarks.live.tables import print_curve, print_load
from neaptide.commands.outputs import check_plot

LOADS = (0.20, 0.10, 0.40)
"""Of the ceiling; the first is the headline."""
BURSTY = Case(0.20, "on-off")
OVER_ALONE = (1.2, 1.8, 2.4, 3.6, 4.8)
RIVALS = ("priority", "priority/16", "fcfs")
MEDIUM_OVER_ALONE = (1.2, 2.4, 4.8)
MEDIUM_RIVALS = ("priority", "fcfs")
QUICK, MEDIUM, LONG = (60.0, (10.0, 55.0)), (75.0, (10.0, 70.0)), (300.0, (20.0, 290.0))
"""Seconds of a run, and the window in it that is measured."""


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--quick", action="store_true", help="60 s a run instead of 300, load 0.20 only, no repeat")
    form.add_argument("--medium", action="store_true", help="75 s a run, load 0.20 only, three targets, two rivals")
    parser.add_argument("--loads", type=numbers, metavar="A,B", help="of the ceiling; the first is the headline")
    parser.add_argument("--bursty", action=argparse.BooleanOptionalAction, help="also load 0.20 in bursts")
    parser.add_argument("--targets", type=numbers, metavar="A,B", help="of the curve, in TPOT p50s of online alone")
    parser.add_argument("--rivals", type=words, metavar="P,P", help="POLICY[@STEP_TOKENS][/SEATS], on our engine")
    alone_help = (
        "the TTFT target is so many TTFT p50s of online alone at least (0: five TPOT targets, whatever that is)"
    )
    parser.add_argument("--ttft-over-alone", type=float, default=0.0, metavar="X", help=alone_help)
    predict_help = "also simulate the headline's run from its own step log (all forms but --quick do)"
    parser.add_argument("--predict", action=argparse.BooleanOptionalAction, help=predict_help)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="also on vLLM's kernels, by this interpreter")
    parser.add_argument("--duration-s", type=float, help="of a run, with the same parts of it measured")
    parser.add_argument("--repeats", type=int, help="by turns")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="every point, as .svg or .png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the last line, also there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        if args.plot is not None:
            check_plot(args.plot)
        args.engines = engines_of(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def engines_of(args: argparse.Namespace) -> tuple[Engine, ...]:
    """Raises ValueError for a rival that is none."""
    form: Sequence[str] = () if args.quick else MEDIUM_RIVALS if args.medium else RIVALS
    engines = [ours(form if args.rivals is None else args.rivals)]
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
    )


def plan_of(args: argparse.Namespace, model: Path) -> Plan:
    duration_s, window_s = QUICK if args.quick else MEDIUM if args.medium else LONG
    if args.duration_s is not None:
        scale = args.duration_s / duration_s
        duration_s, window_s = args.duration_s, (window_s[0] * scale, window_s[1] * scale)
    return Plan(duration_s, window_s, model, args.seed)


def main() -> None:
    args = parsed()
    result: dict[str, Any] = asyncio.run(measure(plan_of(args, model_111m()), experiment_of(args)))
    for load in result["loads"]:
        print_load(load)
        if "prediction" in load:
            print_prediction(load["prediction"])
    for curve in result.get("curves", ()):
        print_curve(curve)
    if args.plot is not None and "curves" in result:
        from benchmarks.live.plot import draw

        draw(result["curves"], args.plot)
    line = json.dumps(jsonable(result))
    if args.json is not None:
        args.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
