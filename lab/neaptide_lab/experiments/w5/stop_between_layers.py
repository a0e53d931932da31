"""W5's gain from aborting steps of offline work alone between layers when a chat arrives (ADR 38, 48)."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.executors.simulated.trace_executor import Layers
from neaptide.simulation.scenario import GiveUp
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.experiments.w5.machine import (
    LIVE_MACHINE,
    NUM_LAYERS,
    STEP_NOISE,
    TTFT_OVER_TPOT,
    Bench,
    Size,
    figures_of,
    middle,
)

NAME = "stop-between-layers"
ABOUT = "what do chats and offline work gain where steps are given up between layers when a chat comes?"

HANDOVER_S = 0.0005
"""Assumed time to abort a step."""
WHOLE, GIVEN_UP = "whole steps", "given up"
FULL = Size()
QUICK = Size(loads=(0.1,), duration_s=60.0, window_s=(5.0, 57.0), seeds=(0,))
MEASURES = {
    "ttft_p50_ms": ("TTFT p50", "ms", 0),
    "ttft_p99_ms": ("TTFT p99", "ms", 0),
    "attained_percent": ("both targets", "%", 1),
    "offline_tokens_per_s": ("offline", "tok/s", 0),
}
Ways = dict[str, GiveUp | None]
"""To run steps, by name."""
Figures = dict[str, dict[str, float]]
"""By how steps are run."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    ways: Ways = {WHOLE: None, GIVEN_UP: GiveUp(Layers(NUM_LAYERS, HANDOVER_S))}
    profiles = [LIVE_MACHINE] if quick else [LIVE_MACHINE, load_profile("cpu-111m")]
    rows: list[Row] = []
    notes = [
        f"Every step scatters by {STEP_NOISE:.0%}; medians over seeds {', '.join(map(str, size.seeds))}. A handover "
        f"takes {1e3 * HANDOVER_S:g} ms, assumed. A step may be given up after any of {NUM_LAYERS} layers.",
    ]
    data: dict[str, Any] = {"handover_s": HANDOVER_S, "size": msgspec.to_builtins(size), "machines": {}}
    for profile in profiles:
        bench = Bench.of(profile, size)
        loads: dict[str, Any] = {}
        data["machines"][profile.name] = {"ceiling_tokens_per_s": bench.ceiling_tokens_per_s, "loads": loads}
        for load in size.loads:
            tpot_slo_s = bench.tpot_slo_s(load)
            found = _measure(bench, load, tpot_slo_s, ways)
            loads[str(load)] = {"tpot_slo_s": tpot_slo_s, "runs": found}
            rows += _rows(f"{profile.name}, {load:g}", found)
            notes.append(_note(profile, load, tpot_slo_s, found))
    return ExperimentResult(NAME, rows, notes, data, against=WHOLE)


def _measure(bench: Bench, load: float, tpot_slo_s: float, ways: Ways) -> Figures:
    found: Figures = {}
    for name, give_up in ways.items():
        logging.getLogger(__name__).info("%s, load %g, %s", bench.profile.name, load, name)
        scenarios = [replace(bench.beside(load, seed, tpot_slo_s), give_up=give_up) for seed in bench.size.seeds]
        runs = [simulate(scenario) for scenario in scenarios]
        found[name] = figures_of(one.result for one in runs) | {
            "given_up": middle(float(one.num_aborted) for one in runs)
        }
    return found


def _rows(case: str, found: Figures) -> list[Row]:
    whole, rows = found[WHOLE], []
    for name, figures in found.items():
        if name != WHOLE:
            for measure, (title, unit, digits) in MEASURES.items():
                rows.append(Row(f"{case}, {name}: {title}", figures[measure], whole[measure], unit, digits))
    return rows


def _note(profile: DeviceProfile, load: float, tpot_slo_s: float, found: Mapping[str, Mapping[str, float]]) -> str:
    """The longest steps that cost no chat its targets, and what they bring."""
    whole = found[WHOLE]
    as_good = {
        name: figures
        for name, figures in found.items()
        if figures["attained_percent"] >= whole["attained_percent"] - 1.0
    }
    best = max(as_good, key=lambda name: as_good[name]["offline_tokens_per_s"])
    gain = as_good[best]["offline_tokens_per_s"] / whole["offline_tokens_per_s"] - 1.0
    return (
        f"{profile.name}, load {load:g}: targets {1e3 * TTFT_OVER_TPOT * tpot_slo_s:.0f} and {1e3 * tpot_slo_s:.0f} "
        f"ms; most offline work at attainment within a point of whole steps: {best}, {gain:+.1%}."
    )
