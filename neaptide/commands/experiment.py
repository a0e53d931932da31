"""``neaptide experiment``: run an experiment and show the paper's numbers beside ours."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from neaptide.experiments.registry import EXPERIMENT_NAMES, load_experiment
from neaptide.experiments.result import ExperimentResult, Row

NO_MATPLOTLIB = "--plot needs matplotlib: pip install 'neaptide[plots]'"
TABLE_WIDTH = 118


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("experiment", help="reproduce numbers of the papers, and measure our own")
    parser.add_argument("name", metavar="NAME", help="an experiment, or list")
    parser.add_argument("--quick", action="store_true", help="smaller samples, same definitions")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the result to this file")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the experiment's plot into this file")
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a row that must hold does not, 2 if the command cannot be carried out."""
    if args.name == "list":
        for name in EXPERIMENT_NAMES:
            print(f"{name:<20} {load_experiment(name).ABOUT}")
        return 0
    if args.name not in EXPERIMENT_NAMES:
        return _refuse(f"there is no experiment {args.name!r}; there are: {', '.join(EXPERIMENT_NAMES)}")
    if args.plot is not None and find_spec("matplotlib") is None:
        return _refuse(NO_MATPLOTLIB)
    result = load_experiment(args.name).run(args.quick)
    _show(result)
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if args.plot is not None:
            _draw(result, args.plot)
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}")
    print(json.dumps(result.to_json(), allow_nan=False))
    return 1 if result.failed else 0


def _refuse(message: str) -> int:
    print(f"neaptide experiment: {message}", file=sys.stderr)
    return 2


def _show(result: ExperimentResult) -> None:
    console = Console(width=TABLE_WIDTH)
    table = Table(title=result.name, title_justify="left")
    table.add_column("case")
    for column in (result.against, "ours", "ratio", ""):
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
    from matplotlib.figure import Figure  # no pyplot: it wants a display and keeps global state

    figure = Figure(figsize=(10, 5), layout="constrained")
    result.plot(figure)
    figure.savefig(target, dpi=120)
