"""The card of a policy: a sentence, its figures on each load, and the table of all policies on the same cells."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from neaptide_lab.gym.loads import LOADS
from neaptide_lab.gym.score import HEADINGS, Measured, Score, score

WIDTH = 80
STARVED = 0.01
"""Less of the offline work that is possible counts as none."""
CONCEDED_POINTS = 1.0
"""Policies whose share of chats in time differs by no more count as equal: then offline work decides."""


class Card:
    """
    Args:
        name: the policy, as the user named it.
        measured: its cells that were run, with its figures and the bound's.
        others: scores of the table's policies on the same cells.
    """

    def __init__(self, name: str, measured: Sequence[Measured], others: Mapping[str, Score]) -> None:
        self._name = name
        self._whole = score(measured)
        self._loads = {load: score([one for one in measured if one[0].case == load]) for load in LOADS}
        self._others = {policy: one for policy, one in others.items() if one.cells == self._whole.cells}
        self._partial = [policy for policy, one in others.items() if one.cells != self._whole.cells]

    def show(self, console: Console) -> None:
        for line in self._sentences():
            console.print(line, highlight=False, markup=False)
        loads = _table("load", 15)
        for load, one in self._loads.items():
            if one.cells:
                loads.add_row(load, *one.texts())
        loads.add_row("all", *self._whole.texts(), style="bold")
        console.print(loads, highlight=False)
        if self._others:
            every = {**self._others, self._name: self._whole}
            console.print(ranking(every, self._name), highlight=False)
        for note in self._notes():
            console.print(f"- {note}", highlight=False, markup=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self._name,
            "all": self._whole.to_json(),
            "loads": {load: one.to_json() for load, one in self._loads.items() if one.cells},
            "others": {policy: one.to_json() for policy, one in self._others.items()},
        }

    def _sentences(self) -> Iterator[str]:
        one = self._whole
        attained = "no chat" if one.attained is None else f"{one.attained:.1%} of the chats"
        offline = "" if one.offline_tokens_per_s is None else f", and does {one.offline} offline tok/s"
        yield f"{self._name} keeps both targets for {attained}{offline}."
        starved = [
            load
            for load, each in self._loads.items()
            if each.offline_of_bound is not None and each.offline_of_bound < STARVED
        ]
        if starved:
            yield f"It starves offline work, with under {STARVED:.0%} of what is possible: {', '.join(starved)}."
        if one.attained is not None and self._others:
            points = [(100 * ((other.attained or 0.0) - one.attained), other) for other in self._others.values()]
            more = sum(gained > CONCEDED_POINTS for gained, _ in points)
            equal = [other for gained, other in points if abs(gained) <= CONCEDED_POINTS]
            faster = sum(_offline(other) > _offline(one) for other in equal)
            yield (
                f"Of {len(self._others)} other policies {more} have more chats in time; {len(equal)} have as many, "
                f"{faster} of these with more offline work."
            )

    def _notes(self) -> Iterator[str]:
        yield "chats in time: both targets, TTFT 1 s and TPOT 50 ms"
        yield "of the bound: of what a scheduler could that knows every arrival and length"
        yield "offline bound: what no policy could exceed with the same chats in time"
        if self._whole.dry or any(one.dry for one in self._others.values()):
            yield "*: offline work ran out on a load"
        if self._partial:
            yield f"not measured on all of these cells: {', '.join(self._partial)}"


def ranking(scores: Mapping[str, Score], own: str | None = None) -> Table:
    """Policies with the most chats in time first, and among equals those with the most offline work."""
    table = _table("policy", 20)
    for name, one in sorted(scores.items(), key=lambda each: _worth(each[1]), reverse=True):
        table.add_row(name, *one.texts(), style="bold" if name == own else "")
    return table


def _table(first: str, width: int) -> Table:
    # Wider padding would fold the names.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    table.add_column(first, max_width=width, overflow="fold", vertical="bottom")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    return table


def _worth(one: Score) -> tuple[float, float]:
    return round(one.attained or 0.0, 2), _offline(one)


def _offline(one: Score) -> float:
    return one.offline_tokens_per_s or 0.0
