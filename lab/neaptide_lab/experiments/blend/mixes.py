"""BlendServe's figures 13 to 15: other chats in place of BurstGPT's."""

import logging

from neaptide_lab.experiments.blend.pools import AZURE, SHAREGPT, WILDCHAT, Chats, Mix
from neaptide_lab.experiments.blend.runs import BlendCase, run_all
from neaptide_lab.experiments.blend.setting import PROFILE, QUICK, profile
from neaptide_lab.experiments.blend.tables import (
    COMPARED,
    OPTIMUM_NOTE,
    bars,
    compared,
    describe,
    gain,
    numbers,
    summary,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-mixes"
ABOUT = "gain over depth first with Azure-, ShareGPT- and WildChat-like chats (BlendServe, figures 13 to 15)"

CHATS: dict[str, Chats] = {"Azure": AZURE, "ShareGPT": SHAREGPT, "WildChat": WILDCHAT}
CELLS, QUICK_CELLS = ((0.80, 0.25), (0.80, 0.45), (1.30, 0.25), (1.30, 0.45)), ((1.30, 0.25),)
"""Densities and sharing."""
PAPER_LARGEST = {"Azure": 1.31, "ShareGPT": 1.17}
"""All three lie between 1.08 and 1.31; of WildChat alone the text has no figure."""


def run(quick: bool) -> ExperimentResult:
    device, cells = profile(), QUICK_CELLS if quick else CELLS
    cases = {
        f"{name} {density:.2f}, {sharing:.0%}": BlendCase.of(Mix(density, sharing, chats), QUICK, device)
        for name, chats in CHATS.items()
        for density, sharing in cells
    }
    found = run_all(cases, COMPARED, logging.getLogger(__name__))
    rows = [row for name, ways in found.items() for row in compared(name, cases[name], ways)]
    for chats in CHATS:
        largest = max(gain(ways, "blendserve") for name, ways in found.items() if name.startswith(chats))
        rows.append(Row(f"{chats}, largest: blendserve over dfs", largest, PAPER_LARGEST.get(chats), "", 3))
    rows += summary(cases, found, is_judged=not quick, paper_gain=None, paper_optimum=None)
    notes = [
        describe(QUICK, PROFILE),
        "Parts have the densities and the sharing of the paper's table 4; lengths of prompts, and spreads, are ours.",
        OPTIMUM_NOTE,
    ]
    return ExperimentResult(NAME, rows, notes, {"runs": numbers(cases, found)}, lambda figure: bars(figure, found))
