"""BROS's figure 14: what planning takes of a step."""

from typing import Any

from neaptide_lab.experiments.bros.runs import run_cells
from neaptide_lab.experiments.bros.setting import BROS, OPT_13B, OPT_30B, OURS, Outcome, Runs, Size
from neaptide_lab.experiments.bros.tables import cell_note, plot_by_rate, runs_data, setting_notes
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "scheduler-overhead"
ABOUT = "planning time in percent of a step beside BROS's loads (BROS, figure 14)"

FULL = Size((OPT_13B, OPT_30B), (3.0, 9.0, 15.0), 120.0)
QUICK = Size((OPT_13B,), (9.0,), 30.0, batch_sizes=(16,), lengths=("ShareGPT",))
PAPER_SHARE = {"OPT-13B": 9.52, "OPT-30B": 8.42}
"""The larger end of the paper's ranges (from 9.12 and 7.56), in percent."""
MOST_SHARE = 1.0
"""Largest value of ours, in percent."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    runs = run_cells(size)
    notes = [
        *(cell_note(cell, one, _shown, "planning, ms / step, ms / share, %") for cell, one in runs.items()),
        *setting_notes(size, has_offline=True),
        "Planning is processor time of this machine, of the code that serves; the step is the profile's, on A100s that "
        "are not here, so the share depends on both. Means over all steps of a run.",
    ]
    return ExperimentResult(NAME, overhead_rows(runs), notes, runs_data(size, runs), lambda figure: _plot(figure, runs))


def overhead_rows(runs: Runs) -> list[Row]:
    rows = []
    for cell, one in runs.items():
        for policy in (OURS, BROS):
            share = planning_percent(one.by_policy[policy])
            holds = share <= MOST_SHARE if policy == OURS else None
            rows.append(Row(f"{cell}: planning of {policy}", share, PAPER_SHARE[cell.model.name], "%", holds=holds))
    return rows


def planning_percent(one: Outcome) -> float:
    """Planning time in percent of a step with its planning."""
    return 100.0 * one.planning_s / (one.planning_s + one.step_s)


def _shown(one: Outcome) -> str:
    return f"{1e3 * one.planning_s:.2f} / {1e3 * one.step_s:.1f} / {planning_percent(one):.1f}"


def _plot(figure: Any, runs: Runs) -> None:
    plot_by_rate(figure, runs, {"planning, % of a step": planning_percent})
