"""Simulator against reality: one load on the real engine, then replayed, then simulated, on a virtual clock.

Both forms of the promise (docs/simulation.md): a replay with the recorded step times makes the same decisions and has
the same latencies; a simulation from a profile that was calibrated before the run, corrected for the drift of the
machine's speed, has the same throughput and latencies within stated errors.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from neaptide.engine.batch import BatchShape
from neaptide.engine.clock import MonotonicClock, VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import StepOutputs
from neaptide.engine.record.step_log import AddLine, StepLine, create_log, read_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.estimator.calibration.calibrate import Calibration, Pace
from neaptide.estimator.calibration.micro_runs import MicroRunner
from neaptide.estimator.calibration.report import report
from neaptide.estimator.calibration.steps import Limits
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.executors.simulated.trace_executor import StepTally, TraceExecutor
from neaptide.experiments.fidelity_runs import (
    DRIFT_WINDOW_S,
    OFFLINE_OUT,
    ONLINE_IN,
    ONLINE_OUT,
    Load,
    MachineModel,
    Outcome,
    drive,
    online_percentiles,
)
from neaptide.experiments.models import benchmark_model
from neaptide.experiments.result import ExperimentResult, Row
from neaptide.launch.serve import default_num_threads
from neaptide.simulation.measures import Measures
from neaptide.simulation.replay import Replay, replay

NAME = "sim-fidelity"
ABOUT = "the simulator against a real run of the same load: replayed, and simulated from a calibrated profile"

NUM_BLOCKS = 4096
NEVER = 1 << 30
ONLINE_SHARE = 0.25
"""Of the machine's time, as the calibrated profile sees it, for online work."""
TYPICAL_DECODES = 16
"""In one step, to guess what the machine can do."""
TTFT_STEPS, TPOT_STEPS = 12, 3
"""Targets, in steps of so many decodes."""
HEADROOM_RATIO = 0.1
RECIPE: dict[str, Any] = {"cost_model": {"kind": "online"}, "headroom": "fixed"}
"""In the log's header; the replay here brings its own, equal to the recorded ones."""
ERRORS = {"tokens/s": 0.03, "p50": 0.05, "p99": 0.15}
"""What a simulation may be off, relative."""
REPLAY_ERROR = 0.01
DRAWS = 9
"""Simulations of the run, each with another draw of what steps scatter by; each measure is the median over them."""

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Size:
    duration_s: float
    calibration: Pace


FULL = Size(120.0, Pace(60.0, 1.0, 10))
QUICK = Size(30.0, Pace(20.0, 0.5, 5))


@dataclass(slots=True, frozen=True)
class Replayed:
    found: Replay
    measures: Measures


@dataclass(slots=True, frozen=True)
class Simulated:
    machine: MachineModel
    outcomes: list[Outcome]
    """One for each draw."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    model = benchmark_model()
    with TemporaryDirectory(prefix="neaptide-fidelity-") as name:
        return _Fidelity(model, size, Path(name)).run()


class _Fidelity:
    def __init__(self, model: Path, size: Size, directory: Path) -> None:
        # As in the server's engine process; it counts only before torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from neaptide.executors.torch.torch_executor import TorchExecutor

        self._model = model
        self._size = size
        self._log = directory / "real.jsonl"
        self._directory = directory
        cache = CacheConfig(num_blocks=NUM_BLOCKS)
        self._clock = MonotonicClock()
        executor = ExecutorConfig(model_path=str(model), num_threads=default_num_threads())
        self._executor = TorchExecutor(executor, cache, self._clock)
        self._executor.touch_blocks(NUM_BLOCKS)
        self._cache = cache

    def run(self) -> ExperimentResult:
        log.info("calibrating for %.0f s", self._size.calibration.budget_s)
        base = self._calibrate()
        load = self._load(base)
        log.info("real run of %.0f s", self._size.duration_s)
        real = self._real_run(base, load)
        self._executor.close()
        log.info("replay and simulations")
        replayed = self._replay(base)
        simulated, undrifted = (self._simulate(base, load, real, drift=drift) for drift in (True, False))
        return _result(self._model, load, real, replayed, simulated, undrifted)

    def _calibrate(self) -> RooflineModel:
        scheduler = SchedulerConfig(max_model_len=1024)
        limits = Limits.of(scheduler, NUM_BLOCKS * self._cache.block_size)
        runner = MicroRunner(self._executor, self._clock, self._cache.block_size)
        return report(Calibration(runner, self._clock, limits, self._size.calibration).measure()).chosen.ours

    def _load(self, base: RooflineModel) -> Load:
        """Online work for a quarter of this machine's time, targets that it can keep, offline work without end."""
        decodes, prefill = BatchShape(), BatchShape()
        for _ in range(TYPICAL_DECODES):
            decodes.add(1, ONLINE_IN)
        prefill.add(ONLINE_IN, 0)
        decode_s, prefill_s = base.predict(decodes).seconds, base.predict(prefill).seconds
        rate_rps = ONLINE_SHARE / (prefill_s + ONLINE_OUT * decode_s / TYPICAL_DECODES)
        slos_s = TTFT_STEPS * decode_s, TPOT_STEPS * decode_s
        # Twice what steps full of decodes could do.
        num_rows = 200 + round(2 * self._size.duration_s * TYPICAL_DECODES / (OFFLINE_OUT * decode_s))
        vocab = self._executor.model_config.vocab_size
        return Load.make(rate_rps, self._size.duration_s, num_rows, slos_s, vocab, self._directory)

    def _config(self, load: Load) -> EngineConfig:
        scheduler = SchedulerConfig(max_model_len=1024, ttft_slo_s=load.ttft_slo_s, tpot_slo_s=load.tpot_slo_s)
        return EngineConfig(cache=self._cache, scheduler=scheduler)

    def _real_run(self, base: RooflineModel, load: Load) -> Outcome:
        recorder = StepRecorder(create_log(self._log), self._config(load), NUM_BLOCKS, RECIPE)
        try:
            core = EngineCore(
                self._config(load),
                self._executor,
                OnlineCostModel(base),
                FixedHeadroom(NUM_BLOCKS, HEADROOM_RATIO),
                self._clock,
                observers=[recorder],
            )
            return drive(core, self._clock, load)
        finally:
            recorder.close()

    def _replay(self, base: RooflineModel) -> Replayed:
        """The recorded step times, through the same scheduler: decisions, and latencies from what the core reports."""
        measures = Measures()
        for line in read_log(self._log):
            if isinstance(line, AddLine):
                measures.arrived(line.id, line.arrival_s)

        def take(line: StepLine, outputs: StepOutputs) -> None:
            measures.step(outputs, StepTally(), 0, line.t[-1])

        headroom = FixedHeadroom(NUM_BLOCKS, HEADROOM_RATIO)
        return Replayed(replay(self._log, cost_model=OnlineCostModel(base), headroom=headroom, on_step=take), measures)

    def _simulate(self, base: RooflineModel, load: Load, real: Outcome, *, drift: bool) -> Simulated:
        draws = [self._draw(base, load, real, seed, drift=drift) for seed in range(DRAWS)]
        return Simulated(draws[0][0], [outcome for _, outcome in draws])

    def _draw(
        self, base: RooflineModel, load: Load, real: Outcome, seed: int, *, drift: bool
    ) -> tuple[MachineModel, Outcome]:
        clock = VirtualClock()
        machine = MachineModel(base, real.steps, clock, drift=drift)
        executor = TraceExecutor(
            NUM_BLOCKS, machine, clock, lambda _: NEVER, lambda name: name.startswith("online"), machine.noise, seed
        )
        headroom = FixedHeadroom(NUM_BLOCKS, HEADROOM_RATIO)
        core = EngineCore(self._config(load), executor, OnlineCostModel(base), headroom, clock)
        return machine, drive(core, clock, load)


# ---- what is reported ----


def _result(
    model: Path, load: Load, real: Outcome, replayed: Replayed, simulated: Simulated, undrifted: Simulated
) -> ExperimentResult:
    rows = [_replay_row(replayed), *_replay_latencies(real, replayed), *_simulation_rows(real, simulated.outcomes)]
    machine, plain = simulated.machine, undrifted.machine
    notes = [
        f"Model {model.name}; {len(load.arrivals_s)} online requests at {len(load.arrivals_s) / load.duration_s:.2f}/s "
        f"beside offline work for {load.duration_s:.0f} s; targets TTFT {1e3 * load.ttft_slo_s:.0f} ms, TPOT "
        f"{1e3 * load.tpot_slo_s:.0f} ms; {len(real.steps)} real steps.",
        "Drift correction: the calibrated step time times measured over predicted time of the real steps within "
        f"{DRIFT_WINDOW_S / 2:.0f} s: here {machine.drift.min():.2f} to {machine.drift.max():.2f}. About it, steps "
        f"scatter by {machine.noise:.1%}, which the simulation draws anew, {DRAWS} times: its figures are medians over "
        f"these; mean error {machine.mape:.1%}.",
        f"Without the correction the mean error of a step is {plain.mape:.1%}, and "
        + "; ".join(
            f"{row.case} is off by {abs(row.ratio - 1):.1%}"
            for row in _simulation_rows(real, undrifted.outcomes)
            if row.ratio
        )
        + ".",
    ]
    series = _series(real, replayed, simulated.outcomes[0])
    if real.dry or any(outcome.dry for outcome in simulated.outcomes):
        notes.append("The offline rows ran out before the end: the throughput says little.")
    return ExperimentResult(NAME, rows, notes, series, lambda figure: _plot(figure, series, load), against="real run")


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
    return Row(case, ours, measured, unit, 1, holds=abs(ours / measured - 1.0) <= error)


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


def _plot(figure: Any, series: dict[str, Any], load: Load) -> None:
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
