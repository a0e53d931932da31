"""BlendServe's figure 10: seconds of compute and of memory in each step, over a whole run."""

import logging
from typing import Any

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide_lab.experiments.blend.runs import WAYS, Ran, run_all
from neaptide_lab.experiments.blend.setting import FULL, PROFILE, QUICK, trace_case
from neaptide_lab.experiments.blend.tables import describe, numbers
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-usage"
ABOUT = "how even compute and memory are over the steps of a run (BlendServe, figure 10)"

NUMBER = 2
"""Number of the trace, as in the figure."""
WINDOWS = 200
"""That the steps of a run are averaged in: one step's prompts come in pieces."""
CUT = 10
"""Windows at both ends, in which memory fills and the last answers run."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    cases = {f"trace {NUMBER}": trace_case(NUMBER, size)}
    found = run_all(cases, list(WAYS), logging.getLogger(__name__))
    (ways,) = found.values()
    rows = []
    for way, ran in ways.items():
        compute, memory = (variation(column) for column in windows(ran).T)
        rows += [
            Row(f"{way}: variation of compute", 100 * compute, None, "%", 1),
            Row(f"{way}: variation of memory", 100 * memory, None, "%", 1),
            Row(f"{way}: overlapped", 100 * ran.overlapped, None, "%", 1),
        ]
    of_all = {way: max(map(variation, windows(ran).T)) for way, ran in ways.items()}
    rows += [
        Row(f"{way}: the larger variation, of that of dfs", of_all[way] / of_all["dfs"], None, "", 2, holds)
        for way, holds in (
            ("blendserve", of_all["blendserve"] < of_all["dfs"]),
            ("neaptide", of_all["neaptide"] < of_all["dfs"]),
        )
    ]
    notes = [
        describe(size, PROFILE),
        f"Variation: standard deviation over mean of {WINDOWS - 2 * CUT} windows of steps, the first and the last "
        f"{CUT} left out. The paper shows it without numbers: steady under BlendServe; depth first reads little before "
        "step 90,000 and too much from there on; a shuffled pool reads evenly and computes unevenly.",
    ]
    data = {"runs": numbers(cases, found), "windows_s": {way: windows(ran).tolist() for way, ran in ways.items()}}
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, ways))


def windows(ran: Ran) -> FloatArray:
    """[windows, 2] mean seconds of compute and of memory in a step."""
    parts = [part.mean(axis=0) for part in np.array_split(ran.steps[:, :2], WINDOWS)]
    return np.array(parts[CUT : WINDOWS - CUT])


def variation(column: FloatArray) -> float:
    return float(column.std() / column.mean())


def _plot(figure: Any, ways: dict[str, Ran]) -> None:
    for axes, (way, ran) in zip(figure.subplots(len(ways), 1, sharex=True, sharey=True), ways.items(), strict=True):
        for column, label in zip(windows(ran).T, ("compute", "memory"), strict=True):
            axes.plot(1e3 * column, label=label, linewidth=0.8)
        axes.set_title(way, fontsize=8)
        axes.set_ylabel("ms a step")
    axes.legend()
