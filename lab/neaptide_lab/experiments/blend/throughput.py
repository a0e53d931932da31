"""BlendServe's figure 7: how much faster than depth first a pool runs by density, where compute and memory overlap."""

import logging
from collections.abc import Mapping

from neaptide_lab.experiments.blend.runs import WAYS, BlendCase, Ran, run_all
from neaptide_lab.experiments.blend.setting import FULL, PROFILE, QUICK, TRACES, trace_case
from neaptide_lab.experiments.blend.tables import (
    OPTIMUM_NOTE,
    bars,
    compared,
    describe,
    gain,
    kept,
    numbers,
    of_optimum,
    summary,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "blend-throughput"
ABOUT = "how much faster than depth first do orders by density run, where compute and memory overlap (figure 7)"

PAPER_GAIN, PAPER_OPTIMUM = 1.2084, 0.8655
"""BlendServe's means over the four traces."""
PAPER_TOKENS_PER_S = {"trace 1": 11_080, "trace 2": 8408, "trace 3": 8403, "trace 4": 6325}
"""BlendServe's rates on one device (table 3)."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    cases = {f"trace {number}": trace_case(number, size) for number in (TRACES[:1] if quick else TRACES)}
    found = run_all(cases, list(WAYS), logging.getLogger(__name__))
    rows = [row for name, ways in found.items() for row in _rows(name, cases[name], ways)]
    rows += summary(cases, found, is_judged=not quick, paper_gain=PAPER_GAIN, paper_optimum=PAPER_OPTIMUM)
    notes = [
        describe(size, PROFILE),
        OPTIMUM_NOTE,
        "Overlapped: of the smaller one of compute and memory time of all steps together, what ran beside the other. "
        "Computed again: tokens that a preemption had lost, of all that were computed.",
    ]
    data = {"runs": numbers(cases, found)}
    return ExperimentResult(NAME, rows, notes, data, lambda figure: bars(figure, found, list(WAYS)[1:]))


def _rows(name: str, case: BlendCase, ways: Mapping[str, Ran]) -> list[Row]:
    tokens = sum(request.input_tokens + request.output_tokens for request in case.requests)
    rate = tokens / ways["blendserve"].seconds
    rows = [
        *compared(name, case, ways, PAPER_GAIN),
        Row(f"{name}: balance over dfs", gain(ways, "balance"), None, "", 3),
        Row(f"{name}: blendserve, rate", rate, PAPER_TOKENS_PER_S[name], "tokens/s", 0),
    ]
    for way, ran in ways.items():
        rows += [
            Row(f"{name}: {way}, of the practical optimum", of_optimum(case, ran), None, "", 3),
            Row(f"{name}: {way}, steps bound by compute", 100 * ran.compute_bound, None, "% of the time", 1),
            Row(f"{name}: {way}, overlapped", 100 * ran.overlapped, None, "%", 1),
            Row(f"{name}: {way}, sharing of the bound", 100 * kept(case, ran), None, "%", 2),
            Row(f"{name}: {way}, computed again", 100 * ran.again, None, "%", 1),
        ]
    return rows
