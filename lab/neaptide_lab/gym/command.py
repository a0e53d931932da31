"""``neaptide gym``: one policy on seven loads, three devices and three seeds, beside the bound and every rival."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from neaptide.commands.outputs import JSON_HELP, check_writable, print_json, write_json
from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.runs import BOUND, ROOT, Failed, Run, Runner, Tree, cache_folder, in_a_process
from neaptide_lab.experiments.judgement.worker import Figures
from neaptide_lab.gym.card import WIDTH, Card, ranking
from neaptide_lab.gym.contender import contender
from neaptide_lab.gym.loads import DEVICES, LOADS, SEEDS, cells, device_of
from neaptide_lab.gym.score import Score
from neaptide_lab.gym.table import PAGE, POLICIES, GymTable, page

POLICY_HELP = "FILE.py, FILE.py:Class, module:Class or a policy's name; @1024 and @1024x256 set step tokens and slots"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("gym", help="measure a policy of yours beside every rival; needs no GPU")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    run = actions.add_parser("run", help="run a policy, and show its card")
    run.add_argument("policy", metavar="POLICY", help=POLICY_HELP)
    _add_cells(run)
    run.add_argument("--rivals", action="store_true", help="run the rivals here, too, in place of the kept table")
    run.add_argument("--json", type=Path, metavar="OUT", help=JSON_HELP)
    run.set_defaults(func=run_policy)
    table = actions.add_parser("table", help="show the kept table of all policies, or renew it")
    _add_cells(table)
    policies_help = "rows to renew (all)"
    table.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="P", help=policies_help)
    table.add_argument("--run", action="store_true", help="run the cells that the table lacks, or has by older code")
    table.add_argument("--limit-s", type=float, metavar="X", help="begin no cell after this many seconds")
    table.set_defaults(func=run_table)
    listing = actions.add_parser("list", help="print the loads, devices and seeds")
    listing.set_defaults(func=run_list)


def _add_cells(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="seven short cells of one device and one seed, half a minute of one core")
    add("--load", nargs="+", choices=LOADS, default=list(LOADS), metavar="L", help=f"only of {', '.join(LOADS)} (all)")
    add("--device", nargs="+", choices=DEVICES, default=list(DEVICES), metavar="D", help=f"of {', '.join(DEVICES)}")
    seeds = ", ".join(map(str, SEEDS))
    add("--seed", nargs="+", type=int, choices=SEEDS, default=list(SEEDS), metavar="N", help=f"of {seeds} (all)")
    add("--jobs", type=int, default=1, metavar="N", help="simulations at a time (1)")
    add("--cache", type=Path, default=cache_folder().parent / "gym", metavar="DIR", help="folder of kept results")


def run_policy(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a cell failed, 2 if the command cannot be carried out."""
    try:
        if args.json is not None:
            check_writable(args.json)
        chosen, mine = _cells(args), contender(args.policy)
        table = GymTable()
    except ValueError as error:
        return _refuse(str(error))
    tree = Tree(ROOT)
    runs = [Run(cell, mine.policy, Tree(ROOT, mine.digest)) for cell in chosen]
    bounds = [Run(cell, BOUND, tree) for cell in chosen if not table.has(BOUND, cell, tree.digest(BOUND))]
    rivals = [Run(cell, policy, tree) for policy in POLICIES for cell in chosen] if args.rivals else []
    found = _runner(args, mine.folder).run([*bounds, *runs, *rivals])
    failed = [(name, one) for name, one in found.items() if isinstance(one, Failed)]
    for run in [*bounds, *rivals]:
        if isinstance(one := found[run.name], Figures):
            table.put(run.policy, run.cell, run.tree.digest(run.policy), one)
    measured = []
    for run in runs:
        one, bound = found[run.name], table.figures(BOUND, run.cell)
        if isinstance(one, Figures) and bound is not None:
            measured.append((run.cell, one, bound))
    _say_failed([(cell, policy, one.reason) for (cell, policy, _), one in failed])
    if not measured:
        return _refuse("no cell has figures, so there is no card", 1)
    done = [cell for cell, _, _ in measured]
    others = {policy: table.score(policy, done) for policy in POLICIES if policy != mine.policy}
    card = Card(args.policy, measured, {policy: one for policy, one in others.items() if one.cells})
    _note_older(table, done, tree, "--rivals runs them here")
    line = json.dumps(card.to_json(), allow_nan=False)
    card.show(Console(width=WIDTH))
    write_json(line, args.json)
    print_json(line, args.json)
    return 1 if failed else 0


def run_table(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a cell failed, 2 if the command cannot be carried out."""
    try:
        chosen, table = _cells(args), GymTable()
        unknown = [policy for policy in args.policies if policy not in POLICIES]
        if unknown:
            raise ValueError(f"the table has no row {unknown[0]!r}; it has: {', '.join(POLICIES)}")
    except ValueError as error:
        return _refuse(str(error))
    status = _renew(args, table, chosen) if args.run else 0
    _note_older(table, chosen, Tree(ROOT), "--run renews them")
    console = Console(width=WIDTH)
    for count, scores in _by_count({policy: table.score(policy, chosen) for policy in args.policies}).items():
        console.print(f"{count} of {len(chosen)} cells:", highlight=False)
        console.print(ranking(scores), highlight=False)
    return status


def _by_count(scores: Mapping[str, Score]) -> dict[int, dict[str, Score]]:
    """Policies by the number of cells that were run, the most first: only means over as many can be compared."""
    counts = sorted({one.cells for one in scores.values() if one.cells}, reverse=True)
    return {count: {policy: one for policy, one in scores.items() if one.cells == count} for count in counts}


def run_list(args: argparse.Namespace) -> int:
    for load in LOADS:
        (cell,) = (cell for cell in cells()[: len(LOADS)] if cell.case == load)
        sources = ", ".join(part.source for part in cell.online)
        print(f"{load:<14} {sources} beside {cell.offline}, context {cell.context_tokens:,}")
    print(f"devices: {', '.join(f'{name} ({profile})' for name, profile in DEVICES.items())}")
    print(f"seeds: {', '.join(map(str, SEEDS))}")
    return 0


def _renew(args: argparse.Namespace, table: GymTable, chosen: Sequence[Cell]) -> int:
    """Runs what the table lacks, cell by cell so that policies can be compared soon, and writes it after each run."""
    tree, runner, began_s, failed = Tree(ROOT), _runner(args, ROOT), time.monotonic(), 0
    for cell in chosen:
        for policy in (BOUND, *args.policies):
            if args.limit_s is not None and time.monotonic() - began_s > args.limit_s:
                break
            code = tree.digest(policy)
            if table.has(policy, cell, code):
                continue
            run = Run(cell, policy, tree)
            one = runner.run([run])[run.name]
            failed += isinstance(one, Failed)
            if isinstance(one, Figures):
                table.put(policy, cell, code, one)
                table.save()
    PAGE.write_text(page(table), encoding="utf-8")
    return 1 if failed else 0


def _runner(args: argparse.Namespace, folder: Path) -> Runner:
    def simulate(run: Run) -> Figures | Failed:
        return in_a_process(run, with_bounds=run.policy != BOUND, folder=folder)

    return Runner(args.cache, args.jobs, lambda line: print(line, file=sys.stderr, flush=True), simulate)


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.jobs < 1:
        raise ValueError("--jobs must be at least 1")
    if args.quick:
        return [cell for cell in cells(quick=True) if cell.case in args.load]
    return [
        cell for cell in cells() if cell.case in args.load and device_of(cell) in args.device and cell.seed in args.seed
    ]


def _note_older(table: GymTable, chosen: Sequence[Cell], tree: Tree, remedy: str) -> None:
    older = [
        policy
        for policy in POLICIES
        if any(
            table.figures(policy, cell) is not None and not table.has(policy, cell, tree.digest(policy))
            for cell in chosen
        )
    ]
    if older:
        print(
            f"neaptide gym: the table's rows of {len(older)} policies are by older code; {remedy}",
            file=sys.stderr,
        )


def _say_failed(failed: Sequence[tuple[str, str, str]]) -> None:
    """One line for all cells that failed with the same policy for the same reason."""
    cells: dict[tuple[str, str], list[str]] = {}
    for cell, policy, reason in failed:
        cells.setdefault((policy, reason), []).append(cell)
    for (policy, reason), names in cells.items():
        more = {1: "", 2: " and 1 other"}.get(len(names), f" and {len(names) - 1} others")
        print(f"neaptide gym: {names[0]}{more} | {policy}: {reason}", file=sys.stderr)


def _refuse(message: str, status: int = 2) -> int:
    print(f"neaptide gym: {message}", file=sys.stderr)
    return status
