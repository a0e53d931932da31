"""Runs of the BROS set-up that are made up: the numbers that rows read of them."""

from dataclasses import dataclass, field
from typing import Any

from neaptide_lab.experiments.bros.setting import ALONE, OPT_13B, POLICIES, Cell, CellRuns
from neaptide_lab.experiments.bros.work import WindowWork


@dataclass
class MadeUp:
    """What the rows read of an ``Outcome``."""

    latency_s: float = 0.1
    offline_tokens_per_s: float = 1000.0
    attainment: dict[str, float] = field(default_factory=dict)
    work: WindowWork = field(default_factory=lambda: WindowWork(100.0, 0.5, 0.5))
    num_unfinished: int = 0
    gaps: str = "none"
    step_s: float = 0.05
    planning_s: float = 0.001

    def attained(self, target: str) -> float:
        return self.attainment.get(target, 1.0)


def cell(rate_rps: float = 5.0, lengths: str = "ShareGPT", model: Any = OPT_13B) -> Cell:
    return Cell(model, lengths, rate_rps)


def cell_runs(**others: MadeUp) -> CellRuns:
    """Runs of a cell in which every policy has the same result except the given ones; ``_`` in a name means ``-``."""
    named = {name.replace("_", "-"): one for name, one in others.items()}
    by_policy: Any = {name: named.get(name, MadeUp()) for name in (*POLICIES, ALONE)}
    return CellRuns(by_policy, {16: by_policy["bros"]})
