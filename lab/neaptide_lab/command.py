"""``neaptide experiment``: runs an experiment and shows the paper's numbers next to ours."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from neaptide.commands.outputs import check_plot, check_writable, draw
from neaptide.simulation.result import SimResult
from neaptide_lab.experiments.bros import latency, rt_only, slo
from neaptide_lab.experiments.bros.runs import Part
from neaptide_lab.experiments.bros.setting import Outcome
from neaptide_lab.experiments.forecast_coverage import NAME as FORECAST
from neaptide_lab.experiments.forecast_coverage import run_trace
from neaptide_lab.experiments.quotes import experiment as quotes
from neaptide_lab.experiments.quotes.replays import ReplayedBatch
from neaptide_lab.experiments.registry import EXPERIMENT_NAMES, LOGGER, load_experiment
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.experiments.rivals.kept import KeptRuns
from neaptide_lab.experiments.rivals.sweep import NAME as TUNED_RIVALS
from neaptide_lab.experiments.rivals.sweep import run_kept

T = TypeVar("T")

TABLE_WIDTH = 118
BY_CELL: dict[str, Callable[[bool, Part], ExperimentResult]] = {
    latency.NAME: latency.run_part,
    slo.NAME: slo.run_part,
    rt_only.NAME: rt_only.run_part,
}
"""Experiments of which some cells can be run."""
KEEPING = ", ".join((TUNED_RIVALS, quotes.NAME, *BY_CELL))
DURATIONS = (
    "Roughly, on two CPU cores: golden takes a second; forecast-coverage half a minute; sim-fidelity four minutes; "
    "cost-model-error two, and five more where the 111M model is; baseline-sanity up to ten; "
    "quotes three quarters of an hour; tuned-rivals an hour and a half; clairvoyant and two-steps a "
    "quarter of an hour. With --quick none of them takes more than four."
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "experiment", help="reproduce numbers of the papers, and measure our own", epilog=DURATIONS
    )
    parser.add_argument("name", metavar="NAME", help="an experiment, or list")
    parser.add_argument("--quick", action="store_true", help="smaller samples, same definitions")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result to this file")
    trace_help = "forecast-coverage: measure on this recorded trace, a name or a file, instead of the bundled ones"
    parser.add_argument("--trace", metavar="FILE", help=trace_help)
    parser.add_argument("--speed", type=float, metavar="X", help="with --trace: arrival times are divided by it (1)")
    keep_help = f"{KEEPING}: keep every simulation in this file, and go on from those that it has"
    parser.add_argument("--keep", type=Path, metavar="FILE", help=keep_help)
    cells_help = f"{', '.join(BY_CELL)}: only cells whose names have one of these in them, 'OPT-30B, ShareGPT at 12/s'"
    parser.add_argument("--cells", nargs="+", default=[], metavar="TEXT", help=cells_help)
    window_help = f"{', '.join(BY_CELL)}: seconds of arrivals in every cell"
    parser.add_argument("--window-s", type=float, metavar="X", help=window_help)
    likely_help = "tuned-rivals: only the rivals' points that did best in earlier sweeps"
    parser.add_argument("--likely", action="store_true", help=likely_help)
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw the experiment's plot into this file (.png, .pdf, .svg, ...)"
    )
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a row that must hold does not, 2 if the command cannot be carried out.

    The JSON line is printed for every result there is, also where a file of it could not be written.
    """
    try:
        _check(args)
    except ValueError as error:
        return _refuse(str(error))
    if args.name == "list":
        for name in EXPERIMENT_NAMES:
            print(f"{name:<20} {load_experiment(name).ABOUT}")
        return 0
    try:
        with _progress(args.name):
            result = _run(args)
    except InputError as error:
        return _refuse(str(error))
    _show(result)
    found = result.to_json()
    line = json.dumps(found, allow_nan=False)
    status = 1 if result.failed else 0
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if args.plot is not None:
            _draw(result, args.plot)
    except OSError as error:
        status = _refuse(f"{error.filename}: {error.strerror}")
    print(line)
    return status


class InputError(Exception):
    """The user's file cannot be used."""


def _run(args: argparse.Namespace) -> ExperimentResult:
    if args.name == TUNED_RIVALS:
        return run_kept(args.quick, _kept(SimResult, args.keep), only_likely=args.likely)
    if args.name == quotes.NAME:
        return quotes.run_kept(args.quick, _kept(ReplayedBatch, args.keep))
    if args.name in BY_CELL:
        with _refusals():
            part = Part(tuple(args.cells), args.window_s, _kept(Outcome, args.keep))
            return BY_CELL[args.name](args.quick, part)
    if args.trace is None:
        return load_experiment(args.name).run(args.quick)
    with _refusals():
        return run_trace(args.trace, 1.0 if args.speed is None else args.speed, args.quick)


def _kept(result: type[T], path: Path | None) -> KeptRuns[T]:
    with _refusals():
        return KeptRuns(result, path)


@contextmanager
def _refusals() -> Iterator[None]:
    """What is said of the user's input is an ``InputError``."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error


def _check(args: argparse.Namespace) -> None:
    """Rejects impossible requests before minutes of work. Raises ValueError with one line."""
    if args.name == "list":
        values = (args.trace, args.speed, args.json, args.keep, args.plot, args.window_s)
        if args.quick or args.likely or args.cells or any(given is not None for given in values):
            flags = "--quick, --likely, --trace, --speed, --json, --keep, --cells, --window-s or --plot"
            raise ValueError(f"list takes no {flags}")
        return
    if args.name not in EXPERIMENT_NAMES:
        raise ValueError(f"there is no experiment {args.name!r}; there are: {', '.join(EXPERIMENT_NAMES)}")
    if args.trace is not None and args.name != FORECAST:
        raise ValueError(f"--trace goes with {FORECAST}")
    if args.speed is not None and args.trace is None:
        raise ValueError("--speed goes with --trace")
    if args.keep is not None and args.name not in (TUNED_RIVALS, quotes.NAME, *BY_CELL):
        raise ValueError(f"--keep goes with {KEEPING}")
    for flag, given in (("--cells", args.cells), ("--window-s", args.window_s)):
        if given not in ([], None) and args.name not in BY_CELL:
            raise ValueError(f"{flag} goes with {', '.join(BY_CELL)}")
    if args.likely and (args.quick or args.name != TUNED_RIVALS):
        raise ValueError(f"--likely goes with {TUNED_RIVALS}, without --quick")
    for path in (args.json, args.keep):
        if path is not None:
            check_writable(path)
    if args.plot is not None:
        check_plot(args.plot)


def _refuse(message: str) -> int:
    print(f"neaptide experiment: {message}", file=sys.stderr)
    return 2


class _Follower(logging.Handler):
    """Shows which part of an experiment runs: next to the spinner on a terminal, else one line each."""

    def __init__(self, name: str, progress: Progress, task: TaskID) -> None:
        super().__init__(logging.INFO)
        self._name = name
        self._progress = progress
        self._task = task

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{self._name}: {record.getMessage()}"
        if self._progress.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._progress.update(self._task, description=text)


@contextmanager
def _progress(name: str) -> Iterator[None]:
    """On standard error: a spinner with the time that has passed, on a terminal; the parts of the experiment."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        follower = _Follower(name, progress, progress.add_task(name, total=None))
        level = LOGGER.level
        LOGGER.addHandler(follower)
        LOGGER.setLevel(logging.INFO)
        try:
            yield
        finally:
            LOGGER.removeHandler(follower)
            LOGGER.setLevel(level)


def _show(result: ExperimentResult) -> None:
    console = Console(width=TABLE_WIDTH)
    table = Table(title=result.name, title_justify="left")
    table.add_column("case")
    for column in (result.against, "ours", "ratio", "our check"):
        table.add_column(column, justify="right")
    for row in result.rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(row.case, row.paper_text, row.ours_text, ratio, _verdict(row))
    console.print(table)
    for note in result.notes:
        console.print(f"- {note}", markup=False, highlight=False)


def _verdict(row: Row) -> str:
    return {None: "", True: "holds", False: "FAILS"}[row.holds]


def _draw(result: ExperimentResult, target: Path) -> None:
    if result.plot is None:
        print(f"neaptide experiment: {result.name} has no plot", file=sys.stderr)
        return
    draw(result.plot, target)
