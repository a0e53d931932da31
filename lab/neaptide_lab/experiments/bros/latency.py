"""BROS's figure 10: latency of online requests, and offline throughput, as the online rate rises to 15 requests/s."""

from typing import Any

from neaptide_lab.experiments.bros.runs import Part, run_cells
from neaptide_lab.experiments.bros.setting import (
    BROS,
    FULL,
    OPT_13B,
    OURS,
    ROUND_ROBIN,
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
    lowest_row,
    mean,
    of_lengths,
    plot_by_rate,
    price_notes,
    runs_data,
    setting_notes,
    unfinished_notes,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "bros-latency"
ABOUT = "normalized latency and offline throughput at 3 to 15 online requests per second (BROS, figure 10)"

QUICK = Size((OPT_13B,), (6.0, 12.0), 30.0, batch_sizes=(16, 64))
PAPER_BELOW = {
    "ShareGPT": {VLLM_V0: 74.20, ROUND_ROBIN: 54.31},
    "LMSYS": {VLLM_V0: 69.61, ROUND_ROBIN: 25.77},
}
"""Normalized latency of BROS below that of vLLM and of Round-Robin, in percent, mean over models and rates."""
PAPER_OFFLINE = {
    "ShareGPT": {VLLM_V0: -11.29, ROUND_ROBIN: -8.80},
    "LMSYS": {VLLM_V0: -17.67, ROUND_ROBIN: -15.18},
}
"""Its offline throughput against theirs, in percent."""
LEAST_BELOW = {"ShareGPT": 74.0}
"""Ours below ``fcfs-v0``, in percent: over all, and of each model."""
LEAST_WORK, LEAST_OFFLINE = 97.0, 95.0
"""Least percent of ``fcfs`` that ours must reach in every cell: work done for both classes; offline tokens, if
``SAME_ONLINE`` holds."""
SAME_ONLINE = 0.02
"""Offline tokens are compared only if the online tokens of ``fcfs`` differ from ours by at most this. Elsewhere it does
offline work while online requests wait."""


def run(quick: bool) -> ExperimentResult:
    return run_part(quick, Part())


def run_part(quick: bool, part: Part) -> ExperimentResult:
    """Raises ValueError if a cell is asked for that is not there."""
    size = part.of(QUICK if quick else FULL)
    runs = run_cells(size, part.kept)
    rows = [row for lengths in lengths_in(runs) for row in latency_rows(lengths, of_lengths(runs, lengths))]
    notes = [
        *(cell_note(cell, one, _shown, "ms/token, offline tokens/s, work") for cell, one in runs.items()),
        *price_notes(runs, (OURS, VLLM)),
        *gap_notes(runs),
        *unfinished_notes(runs),
        *setting_notes(size, has_offline=True),
        "The paper's percentages are means over three models and all its rates, which are lost but for 15; they stand "
        "beside bros and beside ours. Its offline throughput counts requests, ours tokens: a window ends in the "
        "middle of a batch of 256.",
        "Work is the device time of what was done for the first time, by the profile's roofline without the costs that "
        "requests of a step share, per second of window (lab/notebook/experiments.md).",
    ]
    return ExperimentResult(NAME, rows, notes, runs_data(size, runs), lambda figure: _plot(figure, runs))


def latency_rows(lengths: str, runs: Runs) -> list[Row]:
    rows = []
    for policy in (OURS, BROS):
        for other in (VLLM_V0, ROUND_ROBIN):
            least = LEAST_BELOW.get(lengths) if (policy, other) == (OURS, VLLM_V0) else None
            cut, paper = mean(below(one, policy, other) for one in runs.values()), PAPER_BELOW[lengths][other]
            holds = None if least is None else cut >= least
            rows.append(Row(f"{lengths}: latency of {policy} below {other}", cut, paper, "%", digits=1, holds=holds))
            change = mean(100.0 * (_offline_ratio(one, policy, other) - 1.0) for one in runs.values())
            case = f"{lengths}: offline tokens of {policy} against {other}"
            rows.append(Row(case, change, PAPER_OFFLINE[lengths][other], "%", digits=1))
    models = list(dict.fromkeys(cell.model for cell in runs))
    if len(models) > 1:
        for model in models:
            cut = mean(below(one, OURS, VLLM_V0) for cell, one in runs.items() if cell.model == model)
            least = LEAST_BELOW.get(lengths)
            case = f"{lengths}, {model.name}: latency of {OURS} below {VLLM_V0}"
            rows.append(Row(case, cut, unit="%", digits=1, holds=None if least is None else cut >= least))
    return [*rows, *_throughput_rows(lengths, runs)]


def _throughput_rows(lengths: str, runs: Runs) -> list[Row]:
    name = f"{lengths}: lowest work of {OURS}, of {VLLM}"
    rows = [lowest_row(name, runs, work_percent, "%", LEAST_WORK)]
    alike = {cell: one for cell, one in runs.items() if does_as_much_online(one)}
    rows.append(Row(f"{lengths}: cells where {VLLM} does as many online tokens", len(alike), digits=0))
    if alike:
        name = f"{lengths}: lowest offline tokens of {OURS}, of {VLLM}, there"
        rows.append(lowest_row(name, alike, lambda one: 100.0 * _offline_ratio(one, OURS, VLLM), "%", LEAST_OFFLINE))
    return rows


def gap_notes(runs: Runs) -> list[str]:
    """Notes from our steps where ours falls short, compared with those of ``fcfs``."""
    return [
        f"{cell}: {OURS} does {work_percent(one):.1f}% of the work of {VLLM}. "
        + " ".join(f"Steps of {policy}: {one.by_policy[policy].gaps}." for policy in (OURS, VLLM))
        for cell, one in runs.items()
        if work_percent(one) < LEAST_WORK
    ]


def work_percent(one: CellRuns) -> float:
    """Work of ours, of that of ``fcfs``."""
    return 100.0 * one.by_policy[OURS].work.total / one.by_policy[VLLM].work.total


def does_as_much_online(one: CellRuns) -> bool:
    """Whether ``fcfs`` did as many online tokens in the window as ours."""
    ours, theirs = (one.by_policy[policy].work.online_tokens_per_s for policy in (OURS, VLLM))
    return abs(theirs - ours) <= SAME_ONLINE * ours


def _offline_ratio(one: CellRuns, policy: str, other: str) -> float:
    theirs = one.by_policy[other].offline_tokens_per_s
    return one.by_policy[policy].offline_tokens_per_s / theirs if theirs else 1.0


def _shown(one: Outcome) -> str:
    return f"{1e3 * one.latency_s:,.0f} / {one.offline_tokens_per_s:,.0f} / {one.work.total:.2f}"


def _plot(figure: Any, runs: Runs) -> None:
    panels = {
        "normalized latency, s/token": lambda one: one.latency_s,
        "offline tokens/s": lambda one: one.offline_tokens_per_s,
    }
    plot_by_rate(figure, runs, panels, log=True)
