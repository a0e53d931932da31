"""BROS's figure 12: online requests without any offline work."""

from typing import Any

from neaptide_lab.experiments.bros.runs import Part, run_cells
from neaptide_lab.experiments.bros.setting import (
    BROS,
    FULL,
    OPT_13B,
    OURS,
    POLICIES,
    VLLM,
    VLLM_V0,
    CellRuns,
    Outcome,
    Runs,
    Size,
)
from neaptide_lab.experiments.bros.tables import (
    below,
    cell_note,
    lengths_in,
    mean,
    of_lengths,
    plot_by_rate,
    runs_data,
    setting_notes,
    unfinished_notes,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "bros-rt-only"
ABOUT = "normalized latency and throughput of online requests alone (BROS, figure 12)"

QUICK = Size((OPT_13B,), (9.0, 15.0), 30.0, batch_sizes=(16, 64), lengths=("ShareGPT",))
PAPER_BELOW, PAPER_THROUGHPUT = 29.36, 1.08
"""BROS against vLLM: percent of normalized latency, times the throughput. The paper does not say which lengths, models
and rates they are means of."""


def run(quick: bool) -> ExperimentResult:
    return run_part(quick, Part())


def run_part(quick: bool, part: Part) -> ExperimentResult:
    """Raises ValueError if a cell is asked for that is not there."""
    size = part.of(QUICK if quick else FULL)
    runs = run_cells(size, part.kept, has_offline=False)
    rows = [row for lengths in lengths_in(runs) for row in rt_only_rows(lengths, of_lengths(runs, lengths))]
    what = "ms/token, online tokens/s, both targets / from arrival, %"
    notes = [
        *(cell_note(cell, one, _shown, what) for cell, one in runs.items()),
        *unfinished_notes(runs),
        *setting_notes(size, has_offline=False),
        "The paper's BROS runs here without its second step and without bidirectional blocks; ours and bros run as "
        "always, on an empty pool. Tokens/s are those of prompts and answers done inside the window: until the device "
        "is full they are the load, whatever the policy.",
    ]
    return ExperimentResult(NAME, rows, notes, runs_data(size, runs), lambda figure: _plot(figure, runs))


def rt_only_rows(lengths: str, runs: Runs) -> list[Row]:
    rows = []
    for policy in (OURS, BROS):
        for other in (VLLM_V0, VLLM):
            is_paper = other == VLLM_V0
            cut = mean(below(one, policy, other) for one in runs.values())
            times = mean(_throughput_ratio(one, policy, other) for one in runs.values())
            case = f"{lengths}: latency of {policy} below {other}"
            rows.append(Row(case, cut, PAPER_BELOW if is_paper else None, "%", digits=1))
            case = f"{lengths}: online tokens of {policy} / {other}"
            rows.append(Row(case, times, PAPER_THROUGHPUT if is_paper else None, "x"))
    for policy in POLICIES:
        both = 100.0 * mean(one.by_policy[policy].attained("both") for one in runs.values())
        rows.append(Row(f"{lengths}: mean attainment of both targets, {policy}", both, unit="%", digits=1))
    return rows


def _throughput_ratio(one: CellRuns, policy: str, other: str) -> float:
    return one.by_policy[policy].work.online_tokens_per_s / one.by_policy[other].work.online_tokens_per_s


def _shown(one: Outcome) -> str:
    attained = " / ".join(f"{100.0 * one.attained(name):.1f}" for name in ("both", "both_from_arrival"))
    return f"{1e3 * one.latency_s:,.0f} / {one.work.online_tokens_per_s:,.0f} / {attained}"


def _plot(figure: Any, runs: Runs) -> None:
    panels = {
        "normalized latency, s/token": lambda one: one.latency_s,
        "online tokens/s": lambda one: one.work.online_tokens_per_s,
    }
    plot_by_rate(figure, runs, panels, log=True)
