"""Score of a policy: its results on some cells, summed beside the bound."""

from collections.abc import Sequence
from typing import Any

import msgspec

from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.worker import Figures

HEADINGS = (
    "chats in\ntime %",
    "of the\nbound %",
    "offline\ntok/s",
    "of its\nbound %",
    "longest\nwait s",
    "preempted\non/off",
    "plan ms\nmean/p99",
)
"""Columns of a card and of the table."""
Measured = tuple[Cell, Figures, Figures]
"""A cell, a policy's figures on it, and the bound's."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Means over cells, each alike; None where there is nothing to measure."""

    cells: int
    attained: float | None
    """Share of chats that met both targets."""
    attained_of_bound: float | None
    """Relative to the share that a clairvoyant could have in time."""
    offline_tokens_per_s: float | None
    offline_of_bound: float | None
    """Relative to the most offline work beside the chats that this policy had in time."""
    longest_wait_s: float | None
    """Longest time to a first token of a chat."""
    preempted_online: int
    preempted_offline: int
    planning_mean_ms: float | None
    """Processor time of planning a step, the mean over all steps."""
    planning_p99_ms: float | None
    """The largest of the cells' p99."""
    dry: int
    """Cells on which the offline pool ran out of work; their offline figures are too low."""

    @property
    def in_time(self) -> str:
        return _percent(self.attained)

    @property
    def offline(self) -> str:
        return "" if self.offline_tokens_per_s is None else f"{self.offline_tokens_per_s:,.0f}"

    def texts(self) -> list[str]:
        """Texts below the headings."""
        wait_s, mean_ms, p99_ms = self.longest_wait_s, self.planning_mean_ms, self.planning_p99_ms
        return [
            self.in_time,
            _percent(self.attained_of_bound),
            self.offline + ("*" if self.dry else ""),
            _percent(self.offline_of_bound),
            "" if wait_s is None else f"{wait_s:.1f}",
            f"{self.preempted_online}/{self.preempted_offline}",
            "" if mean_ms is None or p99_ms is None else f"{mean_ms:.2f}/{p99_ms:.2f}",
        ]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def score(measured: Sequence[Measured]) -> Score:
    """The sum of some cells."""
    figures = [one for _, one, _ in measured]
    steps = sum(one.steps for one in figures)
    planning_ms = sum((one.plan_mean_ms or 0.0) * one.steps for one in figures)
    return Score(
        cells=len(measured),
        attained=_mean(one.attained for one in figures),
        attained_of_bound=_mean(
            None if one.attained is None or not bound.attained else one.attained / bound.attained
            for _, one, bound in measured
        ),
        offline_tokens_per_s=_mean(one.offline_tokens_per_s for cell, one, _ in measured if cell.offline),
        offline_of_bound=_mean(
            one.offline_tokens_per_s / one.offline_bound_tokens_per_s if one.offline_bound_tokens_per_s else None
            for one in figures
        ),
        longest_wait_s=max((one.wait_max_s for one in figures if one.wait_max_s is not None), default=None),
        preempted_online=sum(one.preempted_online for one in figures),
        preempted_offline=sum(one.preempted_offline for one in figures),
        planning_mean_ms=planning_ms / steps if steps else None,
        planning_p99_ms=max((one.plan_p99_ms for one in figures if one.plan_p99_ms is not None), default=None),
        dry=sum(not one.valid for one in figures),
    )


def _mean(values: Any) -> float | None:
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else None


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
