"""The kept table of all policies in the gym: a file of the repository, and the page that is made of it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.runs import BOUND, OURS
from neaptide_lab.experiments.judgement.worker import Figures
from neaptide_lab.gym.loads import LOADS, cells
from neaptide_lab.gym.score import HEADINGS, Score, score
from neaptide_lab.policies import RIVALS

PATH = Path(__file__).with_name("table.json")
PAGE = Path(__file__).parents[2] / "notebook" / "gym.md"
TUNED = ("priority@1024x256", "priority@512x256")
"""The settings of ``priority`` that did best on most loads of ``tuned-rivals``."""
POLICIES = (OURS, "priority", *TUNED, "fcfs", "qoserve", "slidingserve", *RIVALS[:-2])
"""Rows of the table, in the order in which they are run."""


class GymEntry(msgspec.Struct, frozen=True):
    """A policy on a cell."""

    policy: str
    """``bound``: what no policy can exceed."""
    cell: str
    code: str
    """Digest of the code that decided it."""
    figures: Figures


class GymTable:
    """
    Args:
        path: the file, which may not exist yet.

    Raises:
        ValueError: the file is not one of these.
    """

    def __init__(self, path: Path = PATH) -> None:
        self._path = path
        self._entries: dict[tuple[str, str], GymEntry] = {}
        if path.exists():
            try:
                found = msgspec.json.decode(path.read_bytes(), type=list[GymEntry])
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} is no table of the gym: {error}") from error
            self._entries = {(one.policy, one.cell): one for one in found}

    def figures(self, policy: str, cell: Cell) -> Figures | None:
        entry = self._entries.get((policy, cell.name))
        return None if entry is None else entry.figures

    def has(self, policy: str, cell: Cell, code: str) -> bool:
        """Whether the table has it by this code."""
        entry = self._entries.get((policy, cell.name))
        return entry is not None and entry.code == code

    def put(self, policy: str, cell: Cell, code: str, figures: Figures) -> None:
        self._entries[policy, cell.name] = GymEntry(policy, cell.name, code, figures)

    def score(self, policy: str, of: Iterable[Cell]) -> Score:
        """The policy on those of the cells that the table has for it and for the bound."""
        found = []
        for cell in of:
            one, bound = self.figures(policy, cell), self.figures(BOUND, cell)
            if one is not None and bound is not None:
                found.append((cell, one, bound))
        return score(found)

    def save(self) -> None:
        """Writes the file: one line for each entry, in order."""
        order = {policy: number for number, policy in enumerate((BOUND, *POLICIES))}
        entries = sorted(self._entries.values(), key=lambda one: (order.get(one.policy, len(order)), one.cell))
        lines = ",\n".join(msgspec.json.encode(one).decode() for one in entries)
        written = self._path.with_suffix(".new")
        written.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        written.replace(self._path)


def page(table: GymTable) -> str:
    """The table as a page."""
    lines = [
        "# The gym: every policy on the same loads",
        "",
        "Written by `neaptide gym table --run`. [Write a policy](../../docs/write-a-policy.md#measure-it) says what",
        "each column is. What is not here was not run. Planning is processor time on the machine that ran it.",
    ]
    for title, every in (("Quick form", cells(quick=True)), ("Full form", cells())):
        policies = [policy for policy in POLICIES if table.score(policy, every).cells]
        lines += ["", f"## {title}", ""]
        lines += [*_totals(table, policies, every), "", *_by_load(table, policies, every)] if policies else ["Not run."]
    return "\n".join(lines) + "\n"


def _totals(table: GymTable, policies: Sequence[str], every: Sequence[Cell]) -> list[str]:
    rows = [["policy", f"cells of {len(every)}", *(heading.replace("\n", " ") for heading in HEADINGS)]]
    for policy in policies:
        one = table.score(policy, every)
        rows.append([f"`{policy}`", str(one.cells), *one.texts()])
    return _markdown(rows)


def _by_load(table: GymTable, policies: Sequence[str], every: Sequence[Cell]) -> list[str]:
    """Chats in time, and offline tokens per second, of each load."""
    rows = [["chats in time %, offline tok/s", *LOADS]]
    for policy in policies:
        scores = [table.score(policy, [cell for cell in every if cell.case == load]) for load in LOADS]
        rows.append([f"`{policy}`", *(f"{one.in_time}, {one.offline}" if one.cells else "" for one in scores)])
    bounds = [_bound(table, [cell for cell in every if cell.case == load]) for load in LOADS]
    return _markdown([*rows, ["no policy can exceed", *bounds]])


def _bound(table: GymTable, every: Sequence[Cell]) -> str:
    found = [one.attained for cell in every if (one := table.figures(BOUND, cell)) is not None]
    shares = [share for share in found if share is not None]
    return f"{100 * sum(shares) / len(shares):.1f}" if shares else ""


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = ["| " + " | ".join(row) + " |" for row in rows]
    marks = "|---" + "|---:" * (len(rows[0]) - 1) + "|"
    return [head, marks, *others]
