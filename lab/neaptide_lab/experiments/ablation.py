"""What each part of our policy is worth: it is left out, and everything else stays."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from neaptide.engine.scheduler.parts import PARTS
from neaptide.simulation.result import SimResult
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.experiments.rivals.loads import CONV, LOADS, PROFILE, STEP_NOISE, Load, scenario_of

NAME = "ablation"
ABOUT = "what becomes of attainment and offline tokens/s without each part of our policy"

CODE = LOADS[1]


@dataclass(slots=True, frozen=True)
class Size:
    loads: tuple[Load, ...]
    parts: tuple[str, ...] = tuple(PARTS)


FULL = Size(LOADS)
QUICK = Size(
    (
        replace(CONV, window_s=(600.0, 615.0), warm_up_s=10.0),
        replace(CODE, window_s=(1133.0, 1148.0), warm_up_s=10.0),
    )
)

Runs = dict[str, SimResult]
"""By the part that is left out; the whole policy stands under ``WHOLE``."""
WHOLE = ""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    runs = {load.title: _runs(load, size.parts) for load in size.loads}
    data = {
        "settings": {"profile": PROFILE, "loads": msgspec.to_builtins(size.loads), "parts": PARTS},
        "runs": {trace: {part or "whole": _numbers(one) for part, one in of.items()} for trace, of in runs.items()},
    }
    rows = [row for trace, of in runs.items() for row in _rows(trace, of)]
    notes = [
        *[note for trace, of in runs.items() for note in _notes(trace, of)],
        f"{PROFILE}, steps with {STEP_NOISE:.0%} noise, 2,048 tokens and 256 seats, one seed: a percent is noise.",
    ]
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, runs), against="whole policy")


def _runs(load: Load, parts: tuple[str, ...]) -> Runs:
    whole = scenario_of(load)
    runs: Runs = {}
    for part in (WHOLE, *parts):
        logging.getLogger(__name__).info("%s, %s", load.title, f"without {part}" if part else "whole")
        runs[part] = simulate(replace(whole, left_out=(part,) if part else ())).result
    return runs


def _rows(trace: str, runs: Mapping[str, SimResult]) -> list[Row]:
    whole, rows = runs[WHOLE], []
    for part, one in runs.items():
        if part:
            case = f"{trace} without {part}"
            rows.append(Row(f"{case}: offline", _offline(one), _offline(whole), "tok/s", digits=0))
            rows.append(Row(f"{case}: both targets", _attained(one), _attained(whole), "%", digits=1))
    return rows


def _notes(trace: str, runs: Mapping[str, SimResult]) -> list[str]:
    """Parts without which the load is served better, and those that it does not notice."""
    whole = runs[WHOLE]
    better = [
        part
        for part, one in runs.items()
        if part and _offline(one) > 1.01 * _offline(whole) and _attained(one) >= _attained(whole) - 1.0
    ]
    unnoticed = [part for part, one in runs.items() if part and _numbers(one) == _numbers(whole)]
    notes = []
    if better:
        notes.append(f"{trace}: more offline work at the same attainment without {', '.join(better)}.")
    if unnoticed:
        notes.append(f"{trace}: nothing changes without {', '.join(unnoticed)}.")
    return notes


def _offline(result: SimResult) -> float:
    return result.offline_tokens_per_s


def _attained(result: SimResult) -> float:
    return 100.0 * result.attained


def _numbers(result: SimResult) -> dict[str, Any]:
    return {
        "offline_tokens_per_s": result.offline.tokens_per_s,
        "longest_wait_s": result.offline.longest_wait_s,
        "attainment": result.online.attainment,
        "ttft_s": result.online.ttft_s,
        "tpot_s": result.online.tpot_s,
        "itl_s": result.online.itl_s,
        "preemptions": result.preemptions.count_by_class,
        "recomputed_tokens": result.preemptions.recomputed_tokens,
    }


def _plot(figure: Any, runs: Mapping[str, Runs]) -> None:
    axes = figure.subplots(1, len(runs), squeeze=False)[0]
    for place, (trace, of) in zip(axes, runs.items(), strict=True):
        whole = of[WHOLE]
        for part, one in of.items():
            ratio = _offline(one) / _offline(whole) if _offline(whole) else 0.0
            place.plot(ratio, _attained(one), "o" if part else "*", markersize=5 if part else 12)
            place.annotate(
                part or "whole", (ratio, _attained(one)), fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
        place.set_title(trace)
        place.set_xlabel("offline tokens/s over the whole policy's")
        place.set_ylabel("chats with both targets, %")
