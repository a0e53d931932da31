"""Fair shares: each API key's part of the offline work, and the wait of a small job after a huge one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.jobs.setting import WARM_UP_S, JobWatch, conditions, job, scenario_beside_chats
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "fair-shares"
ABOUT = (
    "what ten API keys get of the offline work, one of them greedy, and how long a small job takes beside a huge one"
)

NUM_KEYS = 10
GREEDY_JOBS = 4
"""Jobs of the first key; the others have one each."""
WEIGHTS: dict[str, dict[str, float]] = {"equal weights": {}, "weights 1, 2, 3": {"key8": 2.0, "key9": 3.0}}
MOST_OFF = 0.1
"""Largest deviation from a key's share, relative to it."""
MOST_TIMES = 2.0
"""Its share's time: what a small job may take."""


@dataclass(slots=True, frozen=True)
class Size:
    window_s: float
    rows: int
    """Rows of a job, enough that no key runs out of them."""
    huge_rows: int
    small_rows: int


FULL = Size(120.0, 1300, 2560, 300)
QUICK = Size(40.0, 500, 1700, 150)


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    rows, notes, data = [], [], dict[str, Any]()
    for name, weights in WEIGHTS.items():
        logging.getLogger(__name__).info(name)
        shares, attained = shares_of_keys(size, weights)
        data[name] = shares
        rows += [
            Row(f"{name}, {key}: share", 100 * had, 100 * due, "%", digits=1) for key, (had, due) in shares.items()
        ]
        off = furthest_off(shares)
        holds = off <= MOST_OFF if not quick else None
        rows.append(Row(f"{name}: furthest from its share", 100 * off, unit="%", digits=1, holds=holds))
        notes.append(f"{name}: {100 * attained:.1f}% of the chats had both targets.")
    logging.getLogger(__name__).info("a small job")
    took_s, share_s = small_job(size)
    data["small job"] = {"took_s": took_s, "share_s": share_s}
    holds = took_s <= MOST_TIMES * share_s
    case = f"{size.small_rows} rows beside a job of {size.huge_rows}"
    rows.append(Row(case, took_s, share_s, "s", digits=1, holds=holds))
    notes += [
        conditions(size.window_s),
        f"A share is that of the tokens of the rows that ended in this time; {NUM_KEYS} keys, of which the first has "
        f"{GREEDY_JOBS} jobs and the others one. A turn is 8,192 tokens, so short windows scatter.",
        "A small job's share is half of the tokens/s that offline work had while it ran.",
    ]
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, data), against="its share")


def shares_of_keys(size: Size, weights: Mapping[str, float]) -> tuple[dict[str, tuple[float, float]], float]:
    """Each key's part and its due share; and the attainment of both targets."""
    keys = [f"key{k}" for k in range(NUM_KEYS)]
    owners = [keys[0]] * (GREEDY_JOBS - 1) + keys
    jobs = [job(number, size.rows, share=key) for number, key in enumerate(owners, 1)]
    watch = JobWatch()
    run = simulate(scenario_beside_chats(jobs, size.window_s, weights), observers=[watch])
    assert run.dry_s is None
    tokens = {key: watch.tokens_of(key, run.window_s) for key in keys}
    all_tokens, all_weights = sum(tokens.values()), sum(weights.get(key, 1.0) for key in keys)
    shares = {key: (tokens[key] / all_tokens, weights.get(key, 1.0) / all_weights) for key in keys}
    return shares, run.result.attained


def furthest_off(shares: Mapping[str, tuple[float, float]]) -> float:
    """Largest deviation of a key from its share, relative to it."""
    return max(abs(had / due - 1.0) for had, due in shares.values())


def small_job(size: Size) -> tuple[float, float]:
    """How long it took, and what its share's time would be."""
    submitted_s = 2 * WARM_UP_S
    jobs = [job(1, size.huge_rows), job(2, size.small_rows, submitted_s=submitted_s)]
    watch = JobWatch()
    simulate(scenario_beside_chats(jobs, size.window_s / 2), observers=[watch])
    huge, small = watch.jobs()
    assert small.num_rows == size.small_rows
    took_s = small.last_end_s - submitted_s
    rate = watch.num_tokens(submitted_s, small.last_end_s) / took_s
    assert huge.last_end_s > small.last_end_s, "the huge job ended first"
    return took_s, small.num_tokens / (rate / 2)


def _plot(figure: Any, data: Mapping[str, Any]) -> None:
    for axes, name in zip(figure.subplots(1, len(WEIGHTS), squeeze=False)[0], WEIGHTS, strict=True):
        keys = list(data[name])
        axes.bar(keys, [100 * data[name][key][0] for key in keys])
        axes.plot(keys, [100 * data[name][key][1] for key in keys], "k_", markersize=14)
        axes.set_title(name)
        axes.set_ylabel("share of the offline tokens, %")
