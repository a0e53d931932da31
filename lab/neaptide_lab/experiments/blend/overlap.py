"""How much of the gain from blending is left as less of compute and memory overlaps: from perfect overlap to none."""

import logging
from typing import Any

from neaptide_lab.experiments.blend.runs import Runs, run_all
from neaptide_lab.experiments.blend.setting import PROFILE, QUICK, trace_case
from neaptide_lab.experiments.blend.tables import COMPARED, OPTIMUM_NOTE, compared, describe, gain, numbers, of_optimum
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-overlap"
ABOUT = "what blending gains as less of compute and memory overlaps, kappa 0 to 1"

KAPPAS, QUICK_KAPPAS = (0.0, 0.1, 0.2, 0.4, 1.0), (0.0, 1.0)
NUMBERS, QUICK_NUMBERS = (1, 4), (1,)
"""Numbers of the traces: two opposite ones."""


def run(quick: bool) -> ExperimentResult:
    numbers_, kappas = (QUICK_NUMBERS, QUICK_KAPPAS) if quick else (NUMBERS, KAPPAS)
    cases = {_name(number, kappa): trace_case(number, QUICK, kappa) for number in numbers_ for kappa in kappas}
    found = run_all(cases, COMPARED, logging.getLogger(__name__))
    rows = []
    for name, ways in found.items():
        rows += [
            *compared(name, cases[name], ways),
            Row(f"{name}: neaptide over dfs", gain(ways, "neaptide"), None, "", 3),
            Row(f"{name}: neaptide, of the practical optimum", of_optimum(cases[name], ways["neaptide"]), None, "", 3),
        ]
    notes = [
        describe(QUICK, PROFILE, None),
        "At kappa 1 nothing overlaps: a step takes the sum of both, and an order gains only by sharing and by fewer "
        "steps in which weights take longer than what is computed.",
        OPTIMUM_NOTE,
    ]
    return ExperimentResult(
        NAME,
        rows,
        notes,
        {"runs": numbers(cases, found)},
        lambda figure: _plot(figure, found, numbers_, kappas),
    )


def _name(number: int, kappa: float) -> str:
    return f"trace {number}, kappa {kappa}"


def _plot(figure: Any, found: Runs, numbers_: tuple[int, ...], kappas: tuple[float, ...]) -> None:
    axes = figure.subplots()
    for number in numbers_:
        for way in COMPARED[1:]:
            gains = [gain(found[_name(number, kappa)], way) for kappa in kappas]
            axes.plot(kappas, gains, "o-", label=f"trace {number}, {way}")
    axes.set_xlabel("kappa")
    axes.set_ylabel("throughput over dfs")
    axes.legend()
