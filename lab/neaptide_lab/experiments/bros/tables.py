"""How the runs of a figure are shown: means over cells, a line for every cell, settings, plots."""

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

import msgspec

from neaptide.estimator.recipes import DEFAULT_HEADROOM
from neaptide_lab.experiments.bros.setting import (
    BROS,
    DRAIN_S,
    OFFLINE,
    POLICIES,
    TPOT_SLO_S,
    TTFT_SLO_S,
    Cell,
    CellRuns,
    Outcome,
    Runs,
    Size,
)
from neaptide_lab.experiments.price import price
from neaptide_lab.experiments.result import Row

Value = Callable[[CellRuns], float]


def lengths_in(runs: Runs) -> list[str]:
    return list(dict.fromkeys(cell.lengths for cell in runs))


def of_lengths(runs: Runs, lengths: str) -> Runs:
    return {cell: one for cell, one in runs.items() if cell.lengths == lengths}


def below(one: CellRuns, policy: str, other: str) -> float:
    """By how many percent the normalized latency of a policy lies below another's."""
    return 100.0 * (1.0 - one.by_policy[policy].latency_s / one.by_policy[other].latency_s)


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    return fmean(list(values) or [0.0])


def lowest_row(name: str, runs: Runs, value: Value, unit: str, least: float | None) -> Row:
    """The worst cell, which must reach ``least``."""
    worst = min(runs, key=lambda cell: value(runs[cell]))
    ours = value(runs[worst])
    return Row(f"{name} ({worst})", ours, unit=unit, digits=1, holds=None if least is None else ours >= least)


def setting_notes(size: Size, *, has_offline: bool) -> list[str]:
    models = ", ".join(
        f"{model.name} on {model.profile} with context {model.context_tokens:,}" for model in size.models
    )
    beside = f", beside {OFFLINE}: 256 requests at once, again when the last has ended" if has_offline else ""
    return [
        f"{models}; {size.window_s:g} s of Poisson arrivals{beside}. TTFT {TTFT_SLO_S:g} s, TPOT {TPOT_SLO_S:g} s, 256 "
        "seats, 2,048 tokens a step (fcfs-v0: prompts up to the context), no max_tokens, no noise, planning time "
        f"charged, {DEFAULT_HEADROOM} headroom; a run goes on until all is answered, at most {DRAIN_S:,.0f} s.",
        f"{BROS} is what the paper says of it, here without bidirectional blocks, with the best initial batch size of "
        f"{', '.join(map(str, size.batch_sizes))} in every cell: whole points of attainment, then offline tokens.",
    ]


def cell_note(cell: Cell, one: CellRuns, shown: Callable[[Outcome], str], what: str) -> str:
    """A value of every policy in one cell."""
    parts = [f"{_label(name, one)} {shown(outcome)}" for name, outcome in one.by_policy.items()]
    return f"{cell}: {what}: {', '.join(parts)}."


def price_notes(runs: Runs, policies: Iterable[str]) -> list[str]:
    """Notes on these policies in every cell; ``data.runs`` has those on all."""
    return [
        f"{cell}, {policy}: {price(one.by_policy[policy].result)}." for cell, one in runs.items() for policy in policies
    ]


def _label(name: str, one: CellRuns) -> str:
    return f"{name} (from {one.bros_size})" if name == BROS else name


def unfinished_notes(runs: Runs) -> list[str]:
    """A normalized latency leaves out what has no end."""
    return [
        f"{cell}: under {name} {outcome.num_unfinished} requests had no end when the run was broken off; its "
        "normalized latency leaves them out."
        for cell, one in runs.items()
        for name, outcome in one.by_policy.items()
        if outcome.num_unfinished
    ]


def runs_data(size: Size, runs: Runs) -> dict[str, Any]:
    """For the JSON."""
    return {
        "settings": {
            "models": msgspec.to_builtins(list(dict.fromkeys(cell.model for cell in runs))),
            "window_s": size.window_s,
            "rates_rps": list(dict.fromkeys(cell.rate_rps for cell in runs)),
            "ttft_slo_s": TTFT_SLO_S,
            "tpot_slo_s": TPOT_SLO_S,
            "offline": OFFLINE,
            "drain_s": DRAIN_S,
        },
        "runs": {str(cell): _cell_data(one) for cell, one in runs.items()},
    }


def _cell_data(one: CellRuns) -> dict[str, Any]:
    by_size = {f"{BROS} from {initial}": outcome for initial, outcome in one.bros_by_size.items()}
    others = {name: outcome for name, outcome in one.by_policy.items() if name != BROS}
    return {name: _numbers(outcome) for name, outcome in (others | by_size).items()}


def _numbers(one: Outcome) -> dict[str, Any]:
    return {
        "result": msgspec.to_builtins(one.result),
        "work": msgspec.to_builtins(one.work),
        "unfinished": one.num_unfinished,
        "gaps": one.gaps,
        "step_s": one.step_s,
        "planning_s": one.planning_s,
    }


def plot_by_rate(figure: Any, runs: Runs, panels: dict[str, Callable[[Outcome], float]], *, log: bool = False) -> None:
    """A column for each model and set of lengths, a row for each quantity over the rate."""
    columns = list(dict.fromkeys((cell.model, cell.lengths) for cell in runs))
    grid = figure.subplots(len(panels), len(columns), squeeze=False)
    for place, (model, lengths) in enumerate(columns):
        cells = [cell for cell in runs if (cell.model, cell.lengths) == (model, lengths)]
        for row, (label, value) in enumerate(panels.items()):
            axes = grid[row][place]
            for policy in POLICIES:
                heights = [value(runs[cell].by_policy[policy]) for cell in cells]
                axes.plot([cell.rate_rps for cell in cells], heights, marker="o", label=policy)
            axes.set(title=f"{model.name}, {lengths}", xlabel="requests/s", ylabel=label)
            if log and row == 0:
                axes.set_yscale("log")
    grid[0][0].legend()
