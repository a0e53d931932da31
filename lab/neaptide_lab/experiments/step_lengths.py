"""Offline work alone on every bundled profile: steps as the policy chooses them, and steps of at most a length.

A length binds as targets do: the TPOT target is so long, and what an arrival is taken to wait. Each set is run in file
order and in a GPU server's plan.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neaptide.engine.scheduler.judgement import UNKNOWN_WAIT
from neaptide.estimator.device_profile import load_profile, profile_names
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "step-lengths"
ABOUT = "offline work alone: its rate in steps of the policy's own length over that in the best of several lengths"

SETS = ("sharegpt_lengths",)
MOST_ROWS, SEED = 4000, 0
CONTEXT_TOKENS, CLIENT_LIMIT_TOKENS = 16_384, 1024
FREE = "free"
LENGTHS_S = (0.03, 0.039, 0.05, 0.1, 0.35)
UNBOUND = 3600.0, 0.1
"""Targets of the free steps: nobody waits, and no stream runs."""
CLOSE = 0.98
"""Least rate of the free steps over the best length, which is chosen with hindsight on the same window."""
CPU_SLOWER = 15.0
"""Factor on the window of CPUs, whose answers take so much longer."""


@dataclass(frozen=True)
class Size:
    profiles: tuple[str, ...]
    sets: tuple[str, ...]
    lengths_s: tuple[float, ...]
    window_s: tuple[float, float]
    orders: tuple[str, ...] = ("file", "plan")


FULL = Size(tuple(profile_names()), SETS, LENGTHS_S, (60.0, 260.0))
QUICK = Size(("a100-40g-llama-3.1-8b", "h100-80g-llama-3.1-8b"), SETS[:1], (0.039, 0.1), (20.0, 50.0))


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    rows: list[Row] = []
    data: dict[str, Any] = {}
    for profile in size.profiles:
        for name in size.sets:
            for order in size.orders:
                case = f"{profile}, {name}, {order}"
                logging.getLogger(__name__).info(case)
                rates = {FREE: _tokens_per_s(profile, name, order, None, size.window_s)}
                for length_s in size.lengths_s:
                    rates[f"{1e3 * length_s:g} ms"] = _tokens_per_s(profile, name, order, length_s, size.window_s)
                data[case] = rates
                rows.append(_row(case, rates))
    rows.append(Row("least", min(row.ours for row in rows), None, "", 3))
    notes = [
        f"Virtual time, seed {SEED}, answers of at most {CLIENT_LIMIT_TOKENS:,} tokens, contexts of at most "
        f"{CONTEXT_TOKENS:,}; rates between {size.window_s[0]:g} and {size.window_s[1]:g} s, on CPUs "
        f"{CPU_SLOWER:g} times as late.",
        f"The best length is chosen on the window itself, so a free rate within {1 - CLOSE:.0%} of it counts as equal.",
    ]
    return ExperimentResult(NAME, rows, notes, {"tokens_per_s": data})


def _row(case: str, rates: dict[str, float]) -> Row:
    length, best = max(((name, rate) for name, rate in rates.items() if name != FREE), key=lambda each: each[1])
    ratio = rates[FREE] / best
    return Row(f"{case}: free over {length}", ratio, None, "", 3, holds=ratio >= CLOSE)


def _tokens_per_s(profile: str, name: str, order: str, length_s: float | None, window_s: Sequence[float]) -> float:
    ttft_s, tpot_s = UNBOUND if length_s is None else (length_s / UNKNOWN_WAIT, length_s)
    factor = CPU_SLOWER if profile.startswith("cpu") else 1.0
    scenario = Scenario(
        profile=load_profile(profile),
        offline=[load_offline(name, SEED, limit=MOST_ROWS)],
        ttft_slo_s=ttft_s,
        tpot_slo_s=tpot_s,
        window_s=(factor * window_s[0], factor * window_s[1]),
        with_bounds=False,
        max_model_len=CONTEXT_TOKENS,
        max_output_tokens=CLIENT_LIMIT_TOKENS,
        seed=SEED,
    )
    if order == "plan":
        scenario = scenario.planned_as_served()
    return simulate(scenario).result.offline_tokens_per_s
