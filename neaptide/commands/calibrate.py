"""``neaptide calibrate``: measure step times on this machine, fit the models, write a device profile."""

import argparse
import math
import sys
from pathlib import Path

from neaptide.server.settings import EMBEDDED_MODEL


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="measure how long steps take on this machine, and write a device profile",
        description="Measures steps of a model on this machine, fits the iteration-time models, reports how well "
        "each predicts held-out steps, and writes a device profile. The machine should have nothing else to do.",
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED_MODEL, metavar="MODEL", help=f"directory, hub id, or {EMBEDDED_MODEL} (default)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--num-threads", type=_num_threads, default=0, metavar="N", help="compute threads on a CPU (0: as the server)")
    add("--executor", default="torch", metavar="NAME", help="what computes the steps (torch), in this interpreter")
    add("--executor-arg", action="append", default=[], metavar="K=V", help="argument for the executor; may be repeated")
    add("--out", type=Path, required=True, metavar="FILE", help="file for the profile")
    add("--quick", action="store_true", help="take 20 s instead of 120; less accurate")
    add("--budget-s", type=_budget_s, metavar="S", help="time to take, in seconds")
    add("--seed", type=int, default=0, metavar="N", help="seed of the order of steps (0)")
    add("--json", action="store_true", help="print the profile as one line of JSON and nothing else")
    parser.set_defaults(func=run_command)


def _num_threads(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads (0: the server's default)")
    return int(text)


def _budget_s(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, or 2 with one line on standard error."""
    from neaptide.commands.calibration import (
        calibrate_to_file,
    )  # imports numpy and more, which other commands should not wait for

    try:
        calibrate_to_file(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"neaptide calibrate: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    return 0
