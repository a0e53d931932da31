"""BROS's figure 11: how many online requests get their TTFT and their TPOT, as the rate rises to 15 requests/s."""

from typing import Any

from neaptide_lab.experiments.bros.runs import Part, run_cells
from neaptide_lab.experiments.bros.setting import (
    ALONE,
    BROS,
    FULL,
    OPT_13B,
    OURS,
    POLICIES,
    ROUND_ROBIN,
    VLLM_V0,
    Outcome,
    Runs,
    Size,
)
from neaptide_lab.experiments.bros.tables import (
    cell_note,
    lengths_in,
    lowest_row,
    mean,
    of_lengths,
    plot_by_rate,
    runs_data,
    setting_notes,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "bros-slo"
ABOUT = "attainment of TTFT and TPOT at 3 to 15 online requests per second (BROS, figure 11)"

QUICK = Size((OPT_13B,), (6.0, 12.0), 30.0, batch_sizes=(16, 64))
TARGETS = {"ttft": "TTFT", "tpot": "TPOT"}
PAPER_ATTAINED = {
    "ShareGPT": {(BROS, "tpot"): 65.49, (ROUND_ROBIN, "tpot"): 47.34},
    "LMSYS": {(BROS, "tpot"): 75.38, (ROUND_ROBIN, "tpot"): 42.81},
}
"""Percent, mean over models and rates."""
PAPER_TTFT = {VLLM_V0: 1.28, ROUND_ROBIN: 10.55}
"""The same, of TTFT; of which lengths, or of both, the paper does not say."""
PAPER_TIMES = {
    "ShareGPT": {
        (VLLM_V0, "ttft"): 36.38,
        (VLLM_V0, "tpot"): 1.73,
        (ROUND_ROBIN, "ttft"): 11.75,
        (ROUND_ROBIN, "tpot"): 1.47,
    },
    "LMSYS": {
        (VLLM_V0, "ttft"): 21.42,
        (VLLM_V0, "tpot"): 2.62,
        (ROUND_ROBIN, "ttft"): 14.23,
        (ROUND_ROBIN, "tpot"): 2.28,
    },
}
"""Mean attainment of BROS over that of the other."""
ALONE_REACHES, LEAST_ATTAINED = 0.95, 90.0
"""Where online work alone attains the first, ours with offline work must attain the second, in percent of it."""


def run(quick: bool) -> ExperimentResult:
    return run_part(quick, Part())


def run_part(quick: bool, part: Part) -> ExperimentResult:
    """Raises ValueError if a cell is asked for that is not there."""
    size = part.of(QUICK if quick else FULL)
    runs = run_cells(size, part.kept, has_alone=True)
    rows = [row for lengths in lengths_in(runs) for row in slo_rows(lengths, of_lengths(runs, lengths))]
    notes = [
        *(cell_note(cell, one, _shown, "TTFT / TPOT / both / both from arrival, %") for cell, one in runs.items()),
        *setting_notes(size, has_offline=True),
        "From arrival: every token k by arrival + TTFT + (k - 1) TPOT. TPOT elsewhere is the mean behind the first.",
        "The paper's attainments are means over three models and all its rates, which are lost but for 15; it does not "
        "say which lengths its TTFT attainments belong to. A small attainment makes a large quotient.",
    ]
    return ExperimentResult(NAME, rows, notes, runs_data(size, runs), lambda figure: _plot(figure, runs))


def slo_rows(lengths: str, runs: Runs) -> list[Row]:
    rows = [row for target in TARGETS for row in _judged_rows(lengths, target, runs)]
    for target, name in TARGETS.items():
        attained = {
            policy: 100.0 * mean(one.by_policy[policy].attained(target) for one in runs.values()) for policy in POLICIES
        }
        for policy, percent in attained.items():
            paper = PAPER_TTFT.get(policy) if target == "ttft" else PAPER_ATTAINED[lengths].get((policy, target))
            rows.append(Row(f"{lengths}: mean {name} attainment of {policy}", percent, paper, "%", digits=1))
        for policy in (OURS, BROS):
            for other in (VLLM_V0, ROUND_ROBIN):
                times = attained[policy] / attained[other] if attained[other] else 0.0
                case = f"{lengths}: mean {name} attainment, {policy} / {other}"
                rows.append(Row(case, times, PAPER_TIMES[lengths][other, target], "x"))
    return rows


def _judged_rows(lengths: str, target: str, runs: Runs) -> list[Row]:
    """Where online alone meets the target, offline work must not spoil it."""
    name = TARGETS[target]
    able = {cell: one for cell, one in runs.items() if one.by_policy[ALONE].attained(target) >= ALONE_REACHES}
    rows = [Row(f"{lengths}: cells where {ALONE} reaches {ALONE_REACHES:.0%} of {name}", len(able), digits=0)]
    if able:
        case = f"{lengths}: lowest {name} attainment of {OURS} there"
        rows.append(
            lowest_row(case, able, lambda one: 100.0 * one.by_policy[OURS].attained(target), "%", LEAST_ATTAINED)
        )
    return rows


def _shown(one: Outcome) -> str:
    return " / ".join(f"{100.0 * one.attained(name):.1f}" for name in ("ttft", "tpot", "both", "both_from_arrival"))


def _plot(figure: Any, runs: Runs) -> None:
    panels = {
        "TTFT attained, %": lambda one: 100.0 * one.attained("ttft"),
        "TPOT attained, %": lambda one: 100.0 * one.attained("tpot"),
    }
    plot_by_rate(figure, runs, panels)
