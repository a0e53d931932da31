"""Simulator against reality: one load on the real engine, then replayed, then simulated, on a virtual clock.

Both forms of the promise (docs/simulation.md): a replay with the recorded step times makes the same decisions and has
the same latencies; a simulation from a profile that was calibrated before the run, corrected for how far the machine's
speed had drifted when the window of measurement began, has the same throughput and latencies within stated errors.

Nothing of the window goes into its prediction, and a drift too large for a machine that was calibrated minutes before
is a wrong profile: the check fails for it.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from neaptide.engine.clock import Clock, MonotonicClock, VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, Executor
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import StepOutputs
from neaptide.engine.record.step_log import AddLine, StepLine, create_log, read_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.calibration.calibrate import Calibration, CalibrationPace
from neaptide.estimator.calibration.micro_runs import MicroRunner
from neaptide.estimator.calibration.report import report
from neaptide.estimator.calibration.steps import CalibrationLimits
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.executors.simulated.trace_executor import StepTally, TraceExecutor
from neaptide.launch.threads import default_num_threads
from neaptide.server.engine_client.interpreter import wait_as_in_an_engine
from neaptide.simulation.driven_runs import (
    DRAWS,
    ERRORS,
    NEVER,
    OFFLINE_OUT,
    ONLINE_IN,
    ONLINE_OUT,
    STRETCH_STEPS,
    DrivenLoad,
    MachineModel,
    Outcome,
    drive,
    online_percentiles,
)
from neaptide.simulation.measures import Measures
from neaptide.simulation.replay import Replay, replay
from neaptide_lab.experiments.models import benchmark_model
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "sim-fidelity"
ABOUT = "the simulator against a real run of the same load: replayed, and simulated from a calibrated profile"

NUM_BLOCKS = 4096
MAX_MODEL_LEN = 1024
ONLINE_SHARE = 0.25
"""Fraction of the machine's time for online work, as the calibrated profile predicts it."""
TYPICAL_DECODES = 16
"""In one step, to guess what the machine can do."""
TTFT_STEPS, TPOT_STEPS = 12, 3
"""Targets, in steps of this many decodes."""
HEADROOM_RATIO = 0.1
RECIPE: dict[str, Any] = {"cost_model": {"kind": "online"}, "headroom": "fixed"}
"""In the log's header; the replay here brings its own, equal to the recorded ones."""
REPLAY_ERROR = 0.01
MAX_DRIFT = 1.5
"""Largest ratio of step times before the window to the calibrated ones, in either direction. A machine that shares its
processors changes by this much within minutes; more than that is a profile of another machine."""

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Size:
    duration_s: float
    calibration: CalibrationPace


FULL = Size(150.0, CalibrationPace(60.0, 1.0, 10))
QUICK = Size(40.0, CalibrationPace(20.0, 0.5, 5))


@dataclass(slots=True, frozen=True)
class Replayed:
    found: Replay
    measures: Measures


@dataclass(slots=True, frozen=True)
class Simulated:
    machine: MachineModel
    outcomes: list[Outcome]
    """One for each draw."""


@dataclass(slots=True, frozen=True)
class Findings:
    load: DrivenLoad
    real: Outcome
    replayed: Replayed
    simulated: Simulated
    undrifted: Simulated
    """From the profile as it was calibrated."""


def run(quick: bool) -> ExperimentResult:
    wait_as_in_an_engine()
    from neaptide.executors.torch.torch_executor import TorchExecutor

    size = QUICK if quick else FULL
    model = benchmark_model()
    cache, clock = CacheConfig(num_blocks=NUM_BLOCKS), MonotonicClock()
    executor = TorchExecutor(
        ExecutorConfig(model_path=str(model), num_threads=default_num_threads(model)), cache, clock
    )
    try:
        executor.touch_blocks(NUM_BLOCKS)
        log.info("calibrating for %.0f s", size.calibration.budget_s)
        limits = CalibrationLimits.of(SchedulerConfig(max_model_len=MAX_MODEL_LEN), NUM_BLOCKS * cache.block_size)
        runner = MicroRunner(executor, clock, cache.block_size)
        base = report(Calibration(runner, clock, limits, size.calibration).measure()).chosen.ours
        with TemporaryDirectory(prefix="neaptide-fidelity-") as name:
            vocab = executor.model_config.vocab_size
            found = Fidelity(executor, clock, base, Path(name)).run(size.duration_s, vocab)
    finally:
        executor.close()
    return result_of(model.name, found)


class Fidelity:
    """One comparison: a load on ``executor``, then replayed, then simulated from ``base``.

    Args:
        executor: stands for the machine.
        clock: the machine's.
        base: the calibrated profile's model.
        directory: for the load's tokens and the step log.
    """

    def __init__(self, executor: Executor, clock: Clock, base: RooflineModel, directory: Path) -> None:
        self._executor = executor
        self._clock = clock
        self._base = base
        self._log = directory / "real.jsonl"
        self._directory = directory

    def run(self, duration_s: float, vocab: int) -> Findings:
        load = self._load(duration_s, vocab)
        log.info("real run of %.0f s", duration_s)
        real = self._real_run(load)
        log.info("replay and simulations")
        simulated, undrifted = (self._simulate(load, real, drift=drift) for drift in (True, False))
        return Findings(load, real, self._replay(), simulated, undrifted)

    def _load(self, duration_s: float, vocab: int) -> DrivenLoad:
        """Online work for a quarter of this machine's time, targets that it can keep, offline work without end."""
        decodes, prefill = BatchShape(), BatchShape()
        for _ in range(TYPICAL_DECODES):
            decodes.add(1, ONLINE_IN)
        prefill.add(ONLINE_IN, 0)
        decode_s, prefill_s = self._base.predict(decodes).seconds, self._base.predict(prefill).seconds
        rate_rps = ONLINE_SHARE / (prefill_s + ONLINE_OUT * decode_s / TYPICAL_DECODES)
        slos_s = TTFT_STEPS * decode_s, TPOT_STEPS * decode_s
        # Twice what steps full of decodes could do.
        num_rows = 200 + round(2 * duration_s * TYPICAL_DECODES / (OFFLINE_OUT * decode_s))
        return DrivenLoad.make(rate_rps, duration_s, num_rows, slos_s, vocab, self._directory)

    def _core(
        self, load: DrivenLoad, executor: Executor, clock: Clock, recorder: StepRecorder | None = None
    ) -> EngineCore:
        headroom = FixedHeadroom(NUM_BLOCKS, HEADROOM_RATIO)
        return EngineCore(
            _config(load),
            executor,
            OnlineCostModel(self._base),
            headroom,
            clock,
            observers=[recorder] if recorder else [],
        )

    def _real_run(self, load: DrivenLoad) -> Outcome:
        recorder = StepRecorder(create_log(self._log), _config(load), NUM_BLOCKS, RECIPE)
        try:
            return drive(self._core(load, self._executor, self._clock, recorder), self._clock, load)
        finally:
            recorder.close()

    def _replay(self) -> Replayed:
        """The recorded step times, through the same scheduler: decisions, and latencies from what the core reports."""
        measures = Measures()
        for line in read_log(self._log):
            if isinstance(line, AddLine):
                measures.arrived(line.id, line.arrival_s)

        def take(line: StepLine, outputs: StepOutputs) -> None:
            measures.step(outputs, StepTally(), 0, line.t[-1])

        headroom, model = FixedHeadroom(NUM_BLOCKS, HEADROOM_RATIO), OnlineCostModel(self._base)
        return Replayed(replay(self._log, cost_model=model, headroom=headroom, on_step=take), measures)

    def _simulate(self, load: DrivenLoad, real: Outcome, *, drift: bool) -> Simulated:
        machine = MachineModel(self._base, real.steps_before_window(), drift=drift)
        return Simulated(machine, [self._draw(load, machine, seed) for seed in range(DRAWS)])

    def _draw(self, load: DrivenLoad, machine: MachineModel, seed: int) -> Outcome:
        clock = VirtualClock()
        return drive(self._core(load, simulated_machine(machine, clock, machine.factors(seed)), clock), clock, load)


def simulated_machine(truth: CostModel, clock: VirtualClock, factors: Iterator[float]) -> TraceExecutor:
    return TraceExecutor(
        NUM_BLOCKS, truth, clock, lambda _: NEVER, lambda name: name.startswith("online"), step_factors=factors
    )


def _config(load: DrivenLoad) -> EngineConfig:
    scheduler = SchedulerConfig(max_model_len=MAX_MODEL_LEN, ttft_slo_s=load.ttft_slo_s, tpot_slo_s=load.tpot_slo_s)
    return EngineConfig(cache=CacheConfig(num_blocks=NUM_BLOCKS), scheduler=scheduler)


# ---- what is reported ----


def result_of(model: str, found: Findings) -> ExperimentResult:
    load, real, replayed, simulated = found.load, found.real, found.replayed, found.simulated
    machine = simulated.machine
    rows = [
        _replay_row(replayed),
        *_replay_latencies(real, replayed),
        _profile_row(machine),
        *_simulation_rows(real, simulated.outcomes),
    ]
    window = real.steps_in_window()
    plain = found.undrifted.machine.error(window)
    notes = [
        f"Model {model}; {len(load.arrivals_s)} online requests at {len(load.arrivals_s) / load.duration_s:.2f}/s "
        f"beside offline work for {load.duration_s:.0f} s; targets TTFT {1e3 * load.ttft_slo_s:.0f} ms, TPOT "
        f"{1e3 * load.tpot_slo_s:.0f} ms; {len(real.steps)} real steps.",
        "Drift correction: the calibrated step time times measured over predicted time of the "
        f"{len(real.steps_before_window())} real steps before the window, here {machine.drift:.2f}; nothing of the "
        f"window goes in. Steps scattered by {machine.noise:.1%} then, which the simulation draws anew in stretches of "
        f"{STRETCH_STEPS} steps, {DRAWS} times: its figures are medians over these. Mean error of a step in the window "
        f"{machine.error(window):.1%}.",
        f"Within the window the real steps took {_wander(real, machine)} of the corrected time, by tenths of the "
        "window: what the machine's speed did there, no prediction could know.",
        f"Without the correction the mean error of a step is {plain:.1%}, and "
        + "; ".join(
            f"{row.case} is off by {abs(row.ratio - 1):.1%}"
            for row in _simulation_rows(real, found.undrifted.outcomes)
            if row.ratio
        )
        + ".",
    ]
    series = _series(real, replayed, simulated.outcomes[0])
    if real.dry or any(outcome.dry for outcome in simulated.outcomes):
        notes.append("The offline rows ran out before the end: the throughput says little.")
    return ExperimentResult(NAME, rows, notes, series, lambda figure: _plot(figure, series, load), against="real run")


def _profile_row(machine: MachineModel) -> Row:
    holds = 1.0 / MAX_DRIFT <= machine.drift <= MAX_DRIFT
    return Row("profile: step times before the window over the calibrated", machine.drift, 1.0, holds=holds)


def _wander(real: Outcome, machine: MachineModel) -> str:
    """Least and most of measured over predicted time, over tenths of the window."""
    tenths = [part for part in np.array_split(np.array(real.steps_in_window(), dtype=object), 10) if len(part)]
    ratios = [
        sum(step.seconds for step in part) / sum(machine.predict(step.shape).seconds for step in part)
        for part in tenths
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _replay_row(replayed: Replayed) -> Row:
    found = replayed.found
    case = f"replay: steps decided otherwise, of {found.steps}"
    if found.difference is not None:
        case += f" (the first: {found.difference})"
    return Row(case, float(found.difference is not None), 0.0, digits=0, holds=found.difference is None)


def _replay_latencies(real: Outcome, replayed: Replayed) -> list[Row]:
    ours = online_percentiles(replayed.measures, real)
    return [
        _row(f"replay: {name} {point}", 1e3 * measured, 1e3 * ours[name][point], "ms", REPLAY_ERROR)
        for name, points in online_percentiles(real.measures, real).items()
        for point, measured in points.items()
    ]


def _simulation_rows(real: Outcome, simulated: list[Outcome]) -> list[Row]:
    rows = [
        _row(
            f"simulated: {kind} tokens/s",
            real.tokens_per_s(online=kind == "online"),
            median(outcome.tokens_per_s(online=kind == "online") for outcome in simulated),
            "",
            ERRORS["tokens/s"],
        )
        for kind in ("offline", "online")
    ]
    draws = [online_percentiles(outcome.measures, outcome) for outcome in simulated]
    for name, points in online_percentiles(real.measures, real).items():
        for point in ("p50", "p99"):
            ours = median(draw[name][point] for draw in draws)
            rows.append(_row(f"simulated: {name} {point}", 1e3 * points[point], 1e3 * ours, "ms", ERRORS[point]))
    return rows


def _row(case: str, measured: float, ours: float, unit: str, error: float) -> Row:
    return Row(case, ours, measured, unit, 1, holds=abs(ours - measured) <= error * measured)


def _series(real: Outcome, replayed: Replayed, simulated: Outcome) -> dict[str, Any]:
    measures = {"real": real.measures, "replayed": replayed.measures, "simulated": simulated.measures}
    runs = {"real": real, "simulated": simulated}
    return {
        "tokens": {
            name: {kind: run.cumulative_tokens(online=kind == "online") for kind in ("online", "offline")}
            for name, run in runs.items()
        },
        "ttft_ms": {
            name: [1e3 * (record.first_s - record.arrival_s) for record in one.online.values()]
            for name, one in measures.items()
        },
    }


def _plot(figure: Any, series: dict[str, Any], load: DrivenLoad) -> None:
    """Left: tokens computed over time. Right: time to first token of every online request."""
    tokens, latency = figure.subplots(1, 2)
    for name, style in (("real", "-"), ("simulated", "--")):
        for kind, colour in (("offline", "tab:blue"), ("online", "tab:orange")):
            times_s, counts = series["tokens"][name][kind]
            tokens.plot(times_s, counts, style, color=colour, label=f"{kind}, {name}")
    tokens.set(xlabel="time, s", ylabel="computed tokens")
    tokens.legend()
    for name, marker in (("real", "o"), ("replayed", "x"), ("simulated", "+")):
        latency.plot(load.arrivals_s, series["ttft_ms"][name], marker, label=name, fillstyle="none")
    latency.set(xlabel="arrival, s", ylabel="TTFT, ms", ylim=(0, None))
    latency.legend()
