"""BROS's figure 13: what bidirectional blocks are worth, against computing again what lacks memory."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.bros.setting import (
    BROS,
    DRAIN_S,
    LENGTHS,
    OFFLINE,
    OPT_30B,
    TPOT_SLO_S,
    TTFT_SLO_S,
    Cell,
    scenario,
)
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.two_tenants.counts import TenantCounts

NAME = "bros-bicache"
ABOUT = "targets attained with and without bidirectional blocks (BROS, figure 13)"

HOST_BYTES = 64 << 30
WITH, WITHOUT = "with bidirectional blocks", "without"
ARMS = {WITH: HOST_BYTES, WITHOUT: 0}
RATE_RPS = 10.0
PAPER_TIMES = {"ttft": 1.23, "tpot": 1.63}
"""Attainment with it over attainment without. Lengths and initial batch size are not given."""
TARGETS = {"ttft": "TTFT", "tpot": "TPOT"}


@dataclass(slots=True, frozen=True)
class BicacheSize:
    window_s: float
    lengths: tuple[str, ...] = tuple(LENGTHS)
    batch_sizes: tuple[int, ...] = (16, 32, 64)


FULL = BicacheSize(240.0)
QUICK = BicacheSize(30.0, ("ShareGPT",), (16,))

Case = tuple[str, int]
"""Lengths, and initial batch size."""
Arms = dict[str, SimResult]


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    cases = [(lengths, initial) for lengths in size.lengths for initial in size.batch_sizes]
    counts = {(case, arm): TenantCounts() for case in cases for arm in ARMS}
    runs = {case: {arm: _run(case, size, arm, counts[case, arm]) for arm in ARMS} for case in cases}
    notes = [_note(case, arm, one, counts[case, arm]) for case, arms in runs.items() for arm, one in arms.items()]
    notes += [
        f"{OPT_30B.name} on {OPT_30B.profile} with context {OPT_30B.context_tokens:,}, {size.window_s:g} s of Poisson "
        f"arrivals at {RATE_RPS:g}/s beside {OFFLINE}: 256 requests at once, again when the last has ended. TTFT "
        f"{TTFT_SLO_S:g} s, TPOT {TPOT_SLO_S:g} s, 256 seats, no max_tokens, no noise, planning time charged; a run "
        f"goes on until all is answered, at most {DRAIN_S:,.0f} s. {WITH}: {HOST_BYTES >> 30} GiB of host memory, "
        "copies beside the step's work, so that a step takes the longer of the two.",
    ]
    rows = [row for case, arms in runs.items() for row in bicache_rows(case, arms)]
    data = {
        "window_s": size.window_s,
        "runs": {f"{lengths}, from {initial}": msgspec.to_builtins(arms) for (lengths, initial), arms in runs.items()},
    }
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, runs))


def bicache_rows(case: Case, arms: Arms) -> list[Row]:
    where = f"{case[0]}, from {case[1]}"
    rows = []
    for target, name in TARGETS.items():
        attained = {arm: 100.0 * (one.online.attainment[target] or 0.0) for arm, one in arms.items()}
        rows += [Row(f"{where}: {name} attained {arm}", attained[arm], unit="%", digits=1) for arm in arms]
        times = attained[WITH] / attained[WITHOUT] if attained[WITHOUT] else 0.0
        rows.append(Row(f"{where}: {name} attained, with / without", times, PAPER_TIMES[target], "x"))
    offline = {arm: one.offline_tokens_per_s for arm, one in arms.items()}
    change = 100.0 * (offline[WITH] / offline[WITHOUT] - 1.0) if offline[WITHOUT] else 0.0
    rows.append(Row(f"{where}: offline tokens, with against without", change, unit="%", digits=1))
    return rows


def _run(case: Case, size: BicacheSize, arm: str, counts: TenantCounts) -> SimResult:
    return simulate(arm_scenario(*case, size, arm), observers=[counts]).result


def arm_scenario(lengths: str, initial: int, size: BicacheSize, arm: str) -> Scenario:
    logging.getLogger(__name__).info("%s lengths, initial batch size %d, %s", lengths, initial, arm)
    given = scenario(Cell(OPT_30B, lengths, RATE_RPS), size.window_s)
    profile = msgspec.structs.replace(given.profile, overlaps_copies=True)  # as the paper copies
    return replace(given, profile=profile, policy=BROS, bros_initial_batch_size=initial, host_cache_bytes=ARMS[arm])


def _note(case: Case, arm: str, one: SimResult, counts: TenantCounts) -> str:
    preempted = one.preemptions
    both, latency_ms = 100.0 * one.attained, 1e3 * (one.online.normalized_latency_s or 0.0)
    return (
        f"{case[0]} from {case[1]}, {arm}: both attained {both:.1f}%, offline {one.offline_tokens_per_s:,.0f} "
        f"tokens/s, normalized latency {latency_ms:,.0f} ms; {sum(preempted.count_by_class.values())} computed "
        f"again ({preempted.recomputed_tokens:,} tokens), {counts.num_checkpointed} lost slots to others, "
        f"{counts.num_swapped} swapped out; {counts.num_slots_saved:,} slots to host memory, "
        f"{preempted.swapped_blocks:,} blocks to and from it."
    )


def _plot(figure: Any, runs: dict[Case, Arms]) -> None:
    grid = figure.subplots(1, len(TARGETS), squeeze=False)[0]
    for axes, (target, name) in zip(grid, TARGETS.items(), strict=True):
        places = list(range(len(runs)))
        for shift, arm in enumerate(ARMS):
            heights = [100.0 * (arms[arm].online.attainment[target] or 0.0) for arms in runs.values()]
            axes.bar([place + 0.4 * shift for place in places], heights, width=0.4, label=arm)
        axes.set_xticks(places, [f"{lengths} {initial}" for lengths, initial in runs], rotation=30)
        axes.set(title=OPT_30B.name, ylabel=f"{name} attained, %")
    grid[0].legend()
