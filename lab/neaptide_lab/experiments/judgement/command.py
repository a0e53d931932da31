"""``python -m neaptide_lab judgement``: our policy against that of a commit before, constants and rivals, cell by cell.

Every simulation runs in a process of its own and is kept by the code that decides it, so that a command that was cut
goes on where it was, and a change of the policy runs nothing else again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.cells import CALIBRATION, GROUPS, SETS, cells_of, quick_cells, rivals_of
from neaptide_lab.experiments.judgement.compare import Pair, Summary
from neaptide_lab.experiments.judgement.runs import OURS, ROOT, Outcome, Run, Runner, Tree, cache_folder, tree_of
from neaptide_lab.experiments.judgement.table import cells_table, named_lines, summary_table
from neaptide_lab.experiments.judgement.worker import Figures

BEFORE = "before:"
"""Prefix of a policy that runs on the code of the commit before."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "judgement", help="our policy against a commit before, constants and rivals, on a design of loads"
    )
    add = parser.add_argument
    add("--set", choices=SETS, default=CALIBRATION, dest="set_name", help="loads to choose on, or to report (calibration)")
    add("--group", nargs="+", choices=GROUPS, default=[], metavar="G", help=f"only of {', '.join(GROUPS)} (all)")
    add("--cells", nargs="+", default=[], metavar="TEXT", help="only cells with one of these texts in their names")
    add("--quick", action="store_true", help="a dozen cells, three minutes of one core")
    add("--list", action="store_true", help="print the cells' names and run nothing")
    add("--before", metavar="COMMIT", help="also run our policy of this commit, and compare with it")
    policies_help = f"policies, such as neaptide neaptide@512 {BEFORE}priority@1024x256 neaptide+plan (neaptide)"
    add("--policies", nargs="+", default=[OURS], metavar="P", help=policies_help)
    add("--rivals", action="store_true", help="also run the rivals that belong to each cell")
    add("--against", metavar="P", help=f"the policy that ours is compared with ({BEFORE}{OURS}, or the second)")
    add("--jobs", type=int, default=2, metavar="N", help="simulations at a time (2)")
    add("--cache", type=Path, default=cache_folder(), metavar="DIR", help="folder of kept results")
    add("--kept-only", action="store_true", help="run nothing: show what is kept")
    add("--json", type=Path, metavar="OUT", help="also write every figure to this file")
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a simulation failed, 2 if the command cannot be carried out."""
    try:
        plan = _plan(args)
    except ValueError as error:
        print(f"judgement: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(cell.name for cell in plan.cells))
        return 0
    runner = Runner(args.cache, args.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    outcomes = _outcomes(plan, runner, kept_only=args.kept_only)
    cells = [cell for cell in plan.cells if outcomes[cell.name]]
    print(cells_table(cells, outcomes))
    found = _show_summaries(cells, outcomes, plan.against)
    figures = {
        cell.name: {title: msgspec.to_builtins(one) for title, one in outcomes[cell.name].items()} for cell in cells
    }
    if args.json is not None:
        args.json.write_text(json.dumps({"summary": found, "cells": figures}, indent=1) + "\n", encoding="utf-8")
    failed = sum(not isinstance(one, Figures) for each in outcomes.values() for one in each.values())
    print(json.dumps({"set": args.set_name, "cells": len(cells), "failed": failed, "summary": found}))
    return 1 if failed else 0


@dataclass(slots=True, frozen=True)
class Plan:
    """What is run."""

    cells: list[Cell]
    policies: dict[str, list[str]]
    """Titles of the policies of each cell by its name."""
    trees: dict[bool, Tree]
    """Of policies of the commit before (True), and of this code."""
    against: str | None

    def run_of(self, cell: Cell, title: str) -> Run:
        return Run(cell, title.removeprefix(BEFORE), self.trees[title.startswith(BEFORE)])


def _plan(args: argparse.Namespace) -> Plan:
    cells = quick_cells(args.set_name) if args.quick else cells_of(args.set_name)
    if args.group:
        cells = [cell for cell in cells if cell.group in args.group]
    if args.cells:
        cells = [cell for cell in cells if any(text in cell.name for text in args.cells)]
    if not cells:
        raise ValueError("there is no such cell; see --list")
    trees = {False: Tree(ROOT)}
    titles = list(args.policies)
    if args.before is not None:
        trees[True] = tree_of(args.before, args.cache)
        titles = [f"{BEFORE}{OURS}", *titles]
    titles = list(dict.fromkeys(titles))
    policies = {
        cell.name: [*titles, *(_rivals(cell, has_before=args.before is not None) if args.rivals else [])]
        for cell in cells
    }
    if args.before is None and any(title.startswith(BEFORE) for title in titles):
        raise ValueError(f"{BEFORE}POLICY goes with --before")
    others = [title for title in titles if title != OURS]
    against = args.against or (others[0] if others else None)
    return Plan(cells, policies, trees, against)


def _rivals(cell: Cell, *, has_before: bool) -> list[str]:
    """The rivals of a cell. Theirs is the code of the commit before, if there is one, where it does not change."""
    return [f"{BEFORE}{rival}" if has_before else rival for rival in rivals_of(cell)]


def _outcomes(plan: Plan, runner: Runner, *, kept_only: bool) -> dict[str, dict[str, Outcome]]:
    """By cell and by policy's title."""
    wanted = [(cell, title, plan.run_of(cell, title)) for cell in plan.cells for title in plan.policies[cell.name]]
    if kept_only:
        kept = {(cell.name, title): runner.kept(run) for cell, title, run in wanted}
        found: dict[tuple[str, str], Outcome] = {name: one for name, one in kept.items() if one is not None}
    else:
        ran = runner.run([run for _, _, run in wanted])
        found = {(cell.name, title): ran[run.name] for cell, title, run in wanted}
    return {
        cell.name: {
            title: found[cell.name, title] for title in plan.policies[cell.name] if (cell.name, title) in found
        }
        for cell in plan.cells
    }


def _show_summaries(
    cells: Sequence[Cell], outcomes: dict[str, dict[str, Outcome]], against: str | None
) -> dict[str, dict[str, object]]:
    """Prints the summed pairs of ours and ``against`` by case and by group, and the cells to name."""
    if against is None:
        return {}
    pairs: dict[str, list[Pair]] = {}
    for cell in cells:
        ours, other = outcomes[cell.name].get(OURS), outcomes[cell.name].get(against)
        if isinstance(ours, Figures) and isinstance(other, Figures):
            pair = Pair(cell.name, ours, other)
            for case in dict.fromkeys((f"{cell.group}: {cell.case}", f"{cell.group}: ALL")):
                pairs.setdefault(case, []).append(pair)
    summaries = {case: Summary(tuple(of)) for case, of in sorted(pairs.items())}
    if not summaries:
        return {}
    print(f"\nneaptide against {against}, mean of pairs in points of attainment")
    print(summary_table(summaries))
    for case, one in summaries.items():
        if case.endswith(": ALL"):
            for line in named_lines(one):
                print(f"- {line}")
    return {
        case: {
            "cells": len(one.pairs),
            "points": None if one.points is None else round(one.points.mean, 3),
            "low": None if one.points is None else round(one.points.low, 3),
            "requests": one.requests,
            "offline_ratio": None if one.offline_ratio is None else round(one.offline_ratio, 4),
        }
        for case, one in summaries.items()
    }
