"""A batch that is late with its share alone: best effort misses its deadline, ours meets it, chats must not feel it."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from neaptide.simulation.simulator import Run, simulate
from neaptide_lab.experiments.jobs.setting import WARM_UP_S, JobWatch, conditions, job, scenario_beside_chats
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "batch-deadlines"
ABOUT = "does a batch meet a deadline that its share alone would miss, beside the batches of other keys and chats?"

NUM_OTHERS = 3
DUE_SHARE = 0.6
"""Due time, as a fraction of the time that the batch takes with its share alone."""
CONCEDED = 0.01
"""Largest loss of the chats' attainment."""


@dataclass(slots=True, frozen=True)
class Size:
    window_s: float
    due_rows: int
    other_rows: int
    """Rows of each of the others, enough that none ends."""


FULL = Size(120.0, 800, 1700)
QUICK = Size(50.0, 320, 900)


@dataclass(slots=True, frozen=True)
class Outcome:
    took_s: float
    """The batch that is due."""
    run: Run

    @property
    def attained(self) -> float:
        return self.run.result.attained


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    best_effort = outcome(size, None, without_urgency=True)
    due_s = DUE_SHARE * best_effort.took_s
    ours = outcome(size, due_s, without_urgency=False)
    rows = [
        Row("by turns alone", best_effort.took_s, due_s, "s", digits=1),
        Row("neaptide", ours.took_s, due_s, "s", digits=1, holds=ours.took_s <= due_s),
        Row(
            "both targets of the chats",
            100 * ours.attained,
            100 * best_effort.attained,
            "%",
            digits=1,
            holds=ours.attained >= best_effort.attained - CONCEDED,
        ),
        Row("offline work", _offline(ours), _offline(best_effort), "tok/s", digits=0),
    ]
    notes = [
        conditions(size.window_s),
        f"{size.due_rows} rows are due after {DUE_SHARE:.0%} of the time that they take by turns alone, among those of "
        f"{NUM_OTHERS} other keys, {size.other_rows} each without a deadline. The last two rows are beside turns "
        "alone, not beside the deadline.",
    ]
    data: dict[str, Any] = {"due_s": due_s, "by_turns_s": best_effort.took_s, "ours_s": ours.took_s}
    return ExperimentResult(NAME, rows, notes, data, against="deadline")


def outcome(size: Size, due_s: float | None, *, without_urgency: bool) -> Outcome:
    logging.getLogger(__name__).info("by turns alone" if without_urgency else "neaptide")
    others = [job(number, size.other_rows, share=f"other{number}") for number in range(1, NUM_OTHERS + 1)]
    due = job(NUM_OTHERS + 1, size.due_rows, share="due", submitted_s=WARM_UP_S, deadline_s=due_s)
    scenario = scenario_beside_chats([*others, due], size.window_s)
    watch = JobWatch()
    run = simulate(replace(scenario, left_out=("urgency",) if without_urgency else ()), observers=[watch])
    *_, last = watch.jobs()
    assert last.num_rows == size.due_rows, "the batch has not ended"
    return Outcome(last.last_end_s - WARM_UP_S, run)


def _offline(one: Outcome) -> float:
    return one.run.result.offline_tokens_per_s
