"""``python -m neaptide_lab judgement``: our policy against that of a commit before, constants and rivals, cell by cell.

Every simulation runs in a process of its own and is kept by the code that decides it, so that a command that was cut
goes on where it was, and a change of the policy runs nothing else again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from neaptide_lab.experiments.judgement.bound import has_bound
from neaptide_lab.experiments.judgement.caps import best_caps, cap_titles, choosing_cells, load_of
from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.cells import CALIBRATION, GROUPS, SETS, cells_of, quick_cells, rivals_of
from neaptide_lab.experiments.judgement.compare import Summary
from neaptide_lab.experiments.judgement.runs import BOUND, OURS, ROOT, Outcome, Run, Runner, Tree, cache_folder, tree_of
from neaptide_lab.experiments.judgement.table import cells_table, named_lines, summary_table
from neaptide_lab.experiments.judgement.verdicts import Judged, TitleOf, title_of, verdicts
from neaptide_lab.experiments.judgement.worker import Figures

NO_CAPS, CAPS_BEFORE, CAPS_NEW = "none", "before", "new"
BEST_CAP = "the best cap"
ON_THIS_CODE = (OURS, "neaptide_lab.")
"""Beginnings of rivals' titles that stay on this code: forms of ours, and policies that came with it."""
BEFORE = "before:"
"""Prefix of a policy that runs on the code of the commit before."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "judgement", help="our policy against a commit before, constants and rivals, on a design of loads"
    )
    add = parser.add_argument
    add(
        "--set",
        choices=SETS,
        default=CALIBRATION,
        dest="set_name",
        help="loads to choose on or to report (calibration)",
    )
    add("--group", nargs="+", choices=GROUPS, default=[], metavar="G", help=f"only of {', '.join(GROUPS)} (all)")
    add("--cells", nargs="+", default=[], metavar="TEXT", help="only cells with one of these texts in their names")
    add("--quick", action="store_true", help="a dozen cells, a minute of one core")
    add("--list", action="store_true", help="print the cells' names and run nothing")
    add("--before", metavar="COMMIT", help="also run our policy of this commit, and compare with it")
    policies_help = f"policies, such as neaptide neaptide@512 {BEFORE}priority@1024x256 neaptide+plan (neaptide)"
    add("--policies", nargs="+", default=[OURS], metavar="P", help=policies_help)
    add("--bound", action="store_true", help="also show what no policy can exceed")
    add("--rivals", action="store_true", help="also run the rivals that belong to each cell")
    caps_help = (
        f"compare the design's cells with the best cap of our steps, of the commit {CAPS_BEFORE} or of the {CAPS_NEW} "
        f"code ({NO_CAPS})"
    )
    add("--caps", choices=(NO_CAPS, CAPS_BEFORE, CAPS_NEW), default=NO_CAPS, help=caps_help)
    add("--jobs", type=int, default=2, metavar="N", help="simulations at a time (2)")
    add("--cache", type=Path, default=cache_folder(), metavar="DIR", help="folder of kept results")
    add("--kept-only", action="store_true", help="run nothing: show what is kept")
    add("--json", type=Path, metavar="OUT", help="also write every figure to this file")
    parser.set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a simulation failed or a requirement does not hold, 2 if the command cannot be carried out."""
    try:
        cells, trees = _cells(args), _trees(args)
    except ValueError as error:
        print(f"judgement: {error}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    runner = Runner(args.cache, args.jobs, lambda line: print(line, file=sys.stderr, flush=True))
    session = _Session(runner, trees, kept_only=args.kept_only)
    caps = {} if args.caps == NO_CAPS else session.caps(cells, BEFORE if args.caps == CAPS_BEFORE else "")
    titles = {cell.name: _titles(cell, args, caps) for cell in cells}
    outcomes = session.outcomes(cells, titles)
    cells = [cell for cell in cells if outcomes[cell.name]]
    print(cells_table(cells, outcomes))
    figures = {
        (name, title): one for name, each in outcomes.items() for title, one in each.items() if isinstance(one, Figures)
    }
    judged = Judged(cells, figures, f"{BEFORE}{OURS}" if args.before else None, caps)
    summary: dict[str, object] = {}
    for title in _compared(args):
        summary |= _show_summary(judged, title, title_of(title))
    if caps:
        summary |= _show_summary(judged, BEST_CAP, judged.of_cap)
    found = verdicts(judged)
    print("\n" + "\n".join(map(str, found)))
    if args.json is not None:
        every = {name: msgspec.to_builtins(dict(each)) for name, each in outcomes.items()}
        whole = {"summary": summary, "caps": caps, "cells": every}
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    num_failed = sum(len(each) for each in outcomes.values()) - len(figures)
    failing = [verdict.claim for verdict in found if verdict.holds is False]
    line = {"set": args.set_name, "cells": len(cells), "failed": num_failed, "run": runner.num_run}
    print(json.dumps(line | {"summary": summary, "fails": failing}))
    return 1 if num_failed or failing else 0


class _Session:
    """Runs of a command."""

    def __init__(self, runner: Runner, trees: dict[bool, Tree], *, kept_only: bool) -> None:
        self._runner, self._trees, self._kept_only = runner, trees, kept_only

    def outcomes(self, cells: Sequence[Cell], titles: dict[str, list[str]]) -> dict[str, dict[str, Outcome]]:
        """By cell and title."""
        wanted = [(cell, title, self._run(cell, title)) for cell in cells for title in titles[cell.name]]
        found: dict[str, dict[str, Outcome]] = {cell.name: {} for cell in cells}
        ran = {} if self._kept_only else self._runner.run([run for _, _, run in wanted])
        for cell, title, run in wanted:
            outcome = self._runner.kept(run) if self._kept_only else ran[run.name]
            if outcome is not None:
                found[cell.name][title] = outcome
        return found

    def caps(self, cells: Sequence[Cell], prefix: str) -> dict[str, str]:
        """The title of the best cap of each cell of the design, chosen on calibration loads."""
        choosing = choosing_cells(cells_of(CALIBRATION), cells)
        titles = cap_titles(prefix)
        ran = self.outcomes(choosing, {cell.name: titles for cell in choosing})
        figures = {
            (name, title): one for name, each in ran.items() for title, one in each.items() if isinstance(one, Figures)
        }
        best = best_caps(choosing, figures, titles)
        return {cell.name: best[load_of(cell)] for cell in cells if cell.group == "constant" and load_of(cell) in best}

    def _run(self, cell: Cell, title: str) -> Run:
        return Run(cell, title.removeprefix(BEFORE), self._trees[title.startswith(BEFORE)])


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.quick and args.set_name != CALIBRATION:
        raise ValueError("--quick is of the calibration set")
    cells = quick_cells() if args.quick else cells_of(args.set_name)
    if args.group:
        cells = [cell for cell in cells if cell.group in args.group]
    if args.cells:
        cells = [cell for cell in cells if any(text in cell.name for text in args.cells)]
    if not cells:
        raise ValueError("there is no such cell; see --list")
    return cells


def _trees(args: argparse.Namespace) -> dict[bool, Tree]:
    """Names of the policies of the commit before (True) and of this code (False)."""
    trees = {False: Tree(ROOT)}
    if args.before is not None:
        trees[True] = tree_of(args.before, args.cache)
    elif args.caps == CAPS_BEFORE or any(title.startswith(BEFORE) for title in args.policies):
        raise ValueError(f"{BEFORE}POLICY and --caps {CAPS_BEFORE} go with --before")
    return trees


def _titles(cell: Cell, args: argparse.Namespace, caps: dict[str, str]) -> list[str]:
    """Policies of a cell. Rivals run on the code of the commit before, if there is one: it does not change."""
    before = BEFORE if args.before is not None else ""
    titles = [f"{BEFORE}{OURS}"] if before else []
    titles += args.policies
    if cell.name in caps:
        titles.append(caps[cell.name])
    if args.rivals:
        titles += [title if title.startswith(ON_THIS_CODE) else f"{before}{title}" for title in rivals_of(cell)]
    if args.bound and has_bound(cell):
        titles.append(BOUND)
    return list(dict.fromkeys(titles))


def _compared(args: argparse.Namespace) -> list[str]:
    """The titles that ours is compared with in every cell."""
    before = [f"{BEFORE}{OURS}"] if args.before is not None else []
    return [*before, *(title for title in args.policies if title != OURS)]


def _show_summary(judged: Judged, other: str, title: TitleOf) -> dict[str, object]:
    """Prints the pairs of ours and the other, summed by case and by group, and the cells to name."""
    summaries: dict[str, Summary] = {}
    for group in dict.fromkeys(cell.group for cell in judged.cells):
        of_group = judged.group(group)
        cases = dict.fromkeys(cell.case for cell in of_group)
        for case in cases if len(cases) > 1 else ():
            summaries[f"{group}: {case}"] = judged.pairs([cell for cell in of_group if cell.case == case], title)
        summaries[f"{group}: ALL"] = judged.pairs(of_group, title)
    summaries = {case: one for case, one in summaries.items() if one.pairs}
    if not summaries:
        return {}
    print(f"\n{OURS} against {other}: mean of pairs, in points of attainment; below by 0.5 or not")
    print(summary_table(summaries))
    for case, one in summaries.items():
        if case.endswith(": ALL"):
            print("".join(f"- {line}\n" for line in named_lines(one)), end="")
    return {f"{other} {case}": _numbers(one) for case, one in summaries.items() if case.endswith(": ALL")}


def _numbers(one: Summary) -> dict[str, object]:
    points, ratio = one.points, one.offline_ratio
    return {
        "cells": len(one.pairs),
        "points": None if points is None else [round(each, 3) for each in (points.mean, points.low, points.high)],
        "requests": one.requests,
        "offline_ratio": None if ratio is None else round(ratio, 4),
    }
