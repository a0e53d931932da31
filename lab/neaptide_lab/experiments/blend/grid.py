"""BlendServe's figure 11: the gain over depth first by density and sharing, all 65 cells."""

import logging
from typing import Any

import numpy as np

from neaptide_lab.experiments.blend.pools import Mix
from neaptide_lab.experiments.blend.runs import BlendCase, Runs, run_all
from neaptide_lab.experiments.blend.setting import FULL, PROFILE, QUICK, profile
from neaptide_lab.experiments.blend.tables import COMPARED, OPTIMUM_NOTE, compared, describe, gain, numbers, summary
from neaptide_lab.experiments.result import ExperimentResult

NAME = "blend-grid"
ABOUT = "gain over depth first at 13 densities and 5 shares of common prefixes (BlendServe, figure 11)"

SHARINGS = (0.05, 0.15, 0.25, 0.35, 0.45)
PAPER: dict[float, tuple[float | None, ...]] = {
    0.80: (1.15, 1.15, 1.16, 1.16, 1.16),
    0.85: (1.14, 1.15, 1.15, 1.15, 1.15),
    0.90: (1.19, 1.19, None, 1.21, 1.20),
    0.95: (1.16, 1.16, 1.17, 1.17, 1.17),
    1.00: (1.21, 1.22, 1.23, 1.24, 1.23),
    1.05: (1.25, 1.25, 1.26, 1.26, 1.25),
    1.10: (1.23, 1.23, 1.23, 1.24, 1.24),
    1.15: (1.25, 1.25, 1.26, 1.26, 1.26),
    1.20: (1.24, 1.25, 1.25, 1.25, 1.26),
    1.25: (1.23, 1.24, 1.24, 1.24, 1.24),
    1.30: (1.34, 1.34, 1.34, 1.34, 1.33),
    1.35: (1.23, 1.23, 1.23, 1.24, 1.24),
    1.40: (1.23, 1.23, 1.24, 1.24, 1.24),
}
"""By density, for each sharing, as the paper's first version prints them; one is not legible there."""
PAPER_MEAN = 1.2253
CELLS = tuple((density, sharing) for density in PAPER for sharing in SHARINGS)
QUICK_CELLS = ((0.80, 0.05), (1.30, 0.25), (1.40, 0.45))


def run(quick: bool) -> ExperimentResult:
    cells, size, device = QUICK_CELLS if quick else CELLS, QUICK if quick else FULL, profile()
    cases = {_name(*cell): BlendCase.of(Mix(*cell), size, device) for cell in cells}
    found = run_all(cases, COMPARED, logging.getLogger(__name__))
    rows = []
    for density, sharing in cells:
        name = _name(density, sharing)
        rows += compared(name, cases[name], found[name], PAPER[density][SHARINGS.index(sharing)])
    rows += summary(cases, found, is_judged=not quick, paper_gain=PAPER_MEAN, paper_optimum=None)
    notes = [describe(size, PROFILE), OPTIMUM_NOTE]
    return ExperimentResult(NAME, rows, notes, {"runs": numbers(cases, found)}, lambda figure: _plot(figure, found))


def _name(density: float, sharing: float) -> str:
    return f"{density:.2f}, {sharing:.0%}"


def _plot(figure: Any, found: Runs) -> None:
    """A map for each policy; cells that were not run are empty."""
    panels = figure.subplots(1, len(COMPARED) - 1, sharey=True)
    for axes, way in zip(panels, COMPARED[1:], strict=True):
        gains = np.full((len(PAPER), len(SHARINGS)), np.nan)
        for place, cell in enumerate(CELLS):
            if (ways := found.get(_name(*cell))) is not None:
                row, column = divmod(place, len(SHARINGS))
                gains[row, column] = gain(ways, way)
                axes.text(column, row, f"{gains[row, column]:.2f}", ha="center", va="center", fontsize=7)
        axes.imshow(gains, aspect="auto", cmap="viridis", vmin=1.0)
        axes.set_xticks(range(len(SHARINGS)), [f"{sharing:.0%}" for sharing in SHARINGS])
        axes.set_yticks(range(len(PAPER)), [f"{density:.2f}" for density in PAPER])
        axes.set_xlabel("sharing")
        axes.set_title(f"{way} over dfs")
    panels[0].set_ylabel("density")
