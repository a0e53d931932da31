"""What an experiment hands back, and how it is shown."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, frozen=True)
class Row:
    """One of our numbers, with the paper's."""

    case: str
    ours: float
    paper: float | None = None
    """What the paper prints (or see ``ExperimentResult.against``), in the same unit; None where it says nothing."""
    unit: str = ""
    """For example ``%`` or ``ms``; follows both numbers."""
    digits: int = 2
    """Decimal places shown."""
    holds: bool | None = None
    """Our check: True or False where our number must be what we say it is (not: what the paper prints); None where it
    only informs or cannot be judged."""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; None where the paper has no number or 0."""
        return self.ours / self.paper if self.paper else None

    @property
    def ours_text(self) -> str:
        return self._shown(self.ours)

    @property
    def paper_text(self) -> str:
        return "" if self.paper is None else self._shown(self.paper)

    def _shown(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self.unit and ' ' + self.unit}"


@dataclass(slots=True, frozen=True)
class ExperimentResult:
    """Everything one run of an experiment found."""

    name: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    """Where it disagrees with a paper, what is not measured, what the numbers depend on: a sentence each."""
    data: dict[str, Any] = field(default_factory=dict)
    """More for the JSON: series, settings, moments. Must be JSON."""
    plot: Callable[[Any], None] | None = None
    """Draws on an empty ``matplotlib.figure.Figure``. matplotlib is optional, so it is not imported here."""
    against: str = "paper"
    """What the rows are compared with, where it is not a paper: the heading of ``Row.paper``."""

    @property
    def failed(self) -> list[Row]:
        """Rows that must hold and do not."""
        return [row for row in self.rows if row.holds is False]

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"case": row.case, "paper": row.paper, "ours": row.ours, "ratio": row.ratio, "unit": row.unit}
            | ({} if row.holds is None else {"holds": row.holds})
            for row in self.rows
        ]
        return {
            "experiment": self.name,
            "holds": not self.failed,
            "against": self.against,
            "rows": rows,
            "notes": self.notes,
            "data": self.data,
        }
