"""The constants that our policy may not be below: its own steps capped at so many tokens, the best for each load."""

from collections.abc import Mapping, Sequence

from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.runs import OURS
from neaptide_lab.experiments.judgement.worker import Figures

CAPS = (512, 1024, 1536, 2048)
UNCAPPED = 2048
"""Our own step tokens unless something else is given: this cap is no other policy."""
CHOOSING_LOADS = ("0.8x", "1x", "1.5x")
"""Loads of the calibration cells from which a cap is chosen: below them every cap serves all in time."""
Load = tuple[str, str]
"""Trace and device."""


def load_of(cell: Cell) -> Load:
    return cell.case, cell.profile


def choosing_cells(calibration: Sequence[Cell], judged: Sequence[Cell]) -> list[Cell]:
    """The calibration cells from which the caps of the judged cells are chosen."""
    loads = {load_of(cell) for cell in judged if cell.group == "constant"}
    return [
        cell
        for cell in calibration
        if cell.group == "constant"
        and load_of(cell) in loads
        and cell.replicas == 1
        and any(f" {load} " in cell.name for load in CHOOSING_LOADS)
    ]


def cap_titles(prefix: str) -> list[str]:
    return [f"{prefix}{OURS}" if cap == UNCAPPED else f"{prefix}{OURS}@{cap}" for cap in CAPS]


def best_caps(
    cells: Sequence[Cell], figures: Mapping[tuple[str, str], Figures], titles: Sequence[str]
) -> dict[Load, str]:
    """The title of the cap that is best on each load: most in time in the mean of its cells, then most offline work.

    Args:
        figures: by cell and title. A cell that one of the caps lacks does not count.
    """
    found: dict[Load, str] = {}
    for load in dict.fromkeys(map(load_of, cells)):
        names = [cell.name for cell in cells if load_of(cell) == load]
        whole = [name for name in names if all((name, title) in figures for title in titles)]
        if whole:
            found[load] = max(titles, key=lambda title: _worth([figures[name, title] for name in whole]))
    return found


def _worth(runs: Sequence[Figures]) -> tuple[float, float]:
    attained = sum(run.attained or 0.0 for run in runs)
    return round(attained / len(runs), 6), sum(run.offline_tokens_per_s for run in runs)
