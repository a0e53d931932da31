"""One load, driven the same way on the real engine and on the simulated one."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from neaptide.engine.batch import BatchShape, StepResult
from neaptide.engine.clock import Clock
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.messages import AddBatch, AddRequest
from neaptide.engine.observer import EngineObserver
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.step import Step as EngineStep
from neaptide.executors.simulated.trace_executor import StepTally
from neaptide.loadgen.client.client import poisson_arrivals
from neaptide.loadgen.percentiles import percentiles
from neaptide.simulation.measures import Measures
from neaptide.simulation.offline_feed import NO_DEADLINE_S

ONLINE_IN, ONLINE_OUT = 128, 32
OFFLINE_IN, OFFLINE_OUT = 256, 64
FIRST_TOKEN_ID = 10
"""Special tokens lie below."""
WARM_UP_SHARE = 0.1
"""Of the run, before the window of measurement."""
DRIFT_WINDOW_S = 10.0
"""The machine's speed is the mean over so many seconds around a step."""


@dataclass(slots=True, frozen=True)
class Load:
    """What is asked of the engine. Times in seconds from the start."""

    arrivals_s: Sequence[float]
    prompts: list[list[int]]
    offline_stem: str
    """Token file of the offline rows."""
    num_rows: int
    duration_s: float
    ttft_slo_s: float
    tpot_slo_s: float

    @classmethod
    def make(
        cls, rate_rps: float, duration_s: float, num_rows: int, slos_s: tuple[float, float], vocab: int, directory: Path
    ) -> "Load":
        """Poisson arrivals over the whole duration beside more offline rows than it can do; seeded."""
        rng = random.Random(0)

        def prompt(num_tokens: int) -> list[int]:
            return [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(num_tokens)]

        arrivals_s = poisson_arrivals(rate_rps, duration_s, seed=0)
        stem = str(directory / "offline")
        with TokenFileWriter(stem) as writer:
            for _ in range(num_rows):
                writer.append(prompt(OFFLINE_IN))
        prompts = [prompt(ONLINE_IN) for _ in arrivals_s]
        return cls(arrivals_s, prompts, stem, num_rows, duration_s, *slos_s)

    def online_request(self, index: int, start_s: float) -> AddRequest:
        params = SamplingParams(max_tokens=ONLINE_OUT, ignore_eos=True, temperature=0.0)
        arrival_s = start_s + self.arrivals_s[index]
        return AddRequest(
            f"online-{index}",
            self.prompts[index],
            params,
            Tier.DEFAULT,
            arrival_s,
            self.ttft_slo_s,
            self.tpot_slo_s,
        )

    def offline_batch(self) -> AddBatch:
        params = SamplingParams(max_tokens=OFFLINE_OUT, ignore_eos=True, temperature=0.0)
        rows = list(range(self.num_rows))
        return AddBatch("offline", self.offline_stem, rows, [params], [0] * len(rows), [], NO_DEADLINE_S)


@dataclass(slots=True)
class Step:
    """Times in seconds from the start of the run."""

    start_s: float
    seconds: float
    """Of the executor."""
    host_s: float
    """Of planning and committing."""
    shape: BatchShape


@dataclass(slots=True)
class Outcome:
    """What one run did."""

    measures: Measures = field(default_factory=Measures)
    steps: list[Step] = field(default_factory=list)
    start_s: float = 0.0
    """On the run's clock."""
    duration_s: float = 0.0
    """Asked for; the run goes on until its online requests have ended."""
    dry: bool = False
    """The offline rows ran out before the end."""

    def tokens_per_s(self, *, online: bool) -> float:
        """Computed tokens in the window, per second."""
        _, values = self.cumulative_tokens(online=online)
        begin, end = np.searchsorted(self.step_ends_s, (WARM_UP_SHARE * self.duration_s, self.duration_s))
        seconds = self.step_ends_s[end - 1] - self.step_ends_s[begin]
        return float(values[end - 1] - values[begin]) / float(seconds)

    @property
    def step_ends_s(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([step.start_s + step.host_s + step.seconds for step in self.steps])

    def cumulative_tokens(self, *, online: bool) -> tuple[list[float], list[float]]:
        """Times and tokens computed until then."""
        offline = np.cumsum(self.measures.steps((-math.inf, math.inf))["computed_tokens"])
        total = np.cumsum([step.shape.num_tokens for step in self.steps])
        tokens = total - offline if online else offline
        return self.step_ends_s.tolist(), tokens.tolist()


def online_percentiles(measures: Measures, run: Outcome) -> dict[str, dict[str, float]]:
    """Seconds, of the requests that arrived after the warm-up of ``run``."""
    since_s = run.start_s + WARM_UP_SHARE * run.duration_s
    records = [r for r in measures.online.values() if r.arrival_s >= since_s]
    ttft_s = [r.first_s - r.arrival_s for r in records]
    tpot_s = [r.tpot_s for r in records if r.tpot_s is not None]
    return {name: percentiles(values)._asdict() for name, values in (("TTFT", ttft_s), ("TPOT", tpot_s))}


class _Shapes(EngineObserver):
    """Keeps the shape of the step that was committed last."""

    def __init__(self) -> None:
        self.last = BatchShape()

    def committed(self, step: EngineStep, result: StepResult, scheduler: Scheduler) -> None:
        self.last = step.plan.shape


def drive(core: EngineCore, clock: Clock, load: Load) -> Outcome:
    """Hands the load in as its times come, between steps; returns when every online request has ended."""
    outcome = Outcome(start_s=clock.now(), duration_s=load.duration_s)
    core.handle(load.offline_batch())
    next_online = 0
    queues = core.scheduler.queues
    shapes = _Shapes()
    core.subscribe(shapes)
    while True:
        now_s = clock.now()
        while next_online < len(load.arrivals_s) and outcome.start_s + load.arrivals_s[next_online] <= now_s:
            request = load.online_request(next_online, outcome.start_s)
            outcome.measures.arrived(request.request_id, request.arrival_s)
            core.handle(request)
            next_online += 1
        online_left = next_online < len(load.arrivals_s) or queues.running_online or queues.waiting_online
        if not online_left and now_s - outcome.start_s >= load.duration_s:
            return outcome
        outcome.dry |= not len(queues.pool)
        outputs = core.step()
        outcome.measures.step(outputs, StepTally(), 0, clock.now())
        for stats in outputs.stats:
            host_s = stats.schedule_s + stats.commit_s
            outcome.steps.append(Step(now_s - outcome.start_s, stats.duration_s, host_s, shapes.last))
        if not outputs.stats:
            clock.sleep_until(now_s + 0.005)


class MachineModel:
    """How long steps took on a machine whose speed wanders. Implements ``CostModel``.

    Args:
        base: from a calibration.
        steps: of the real run: their times over the base's predictions are the drift.
    """

    def __init__(self, base: CostModel, steps: Sequence[Step], clock: Clock, *, drift: bool = True) -> None:
        self._base = base
        self._clock = clock
        self._host_s = float(np.median([step.host_s for step in steps]))
        starts_s = np.array([step.start_s for step in steps])
        measured_s = np.array([step.seconds for step in steps])
        predicted_s = np.array([base.predict(step.shape).seconds for step in steps])
        self.drift_at_s = np.arange(0.0, float(starts_s[-1]) + 1.0, 1.0)
        """The drift is known at these times, seconds from the start ..."""
        self.drift = np.ones_like(self.drift_at_s)
        """... as measured over predicted time of the steps around."""
        if drift:
            for index, at_s in enumerate(self.drift_at_s):
                near = np.abs(starts_s - at_s) <= DRIFT_WINDOW_S / 2
                if not near.any():
                    near = np.abs(starts_s - at_s) == np.abs(starts_s - at_s).min()
                self.drift[index] = measured_s[near].sum() / predicted_s[near].sum()
        expected_s = predicted_s * np.interp(starts_s, self.drift_at_s, self.drift)
        residuals = np.log(measured_s / expected_s)
        self.noise = float(1.4826 * np.median(np.abs(residuals - np.median(residuals))))
        """Standard deviation of the logarithm of one step's time about the drift; robust against outliers."""
        self.mape = float(np.mean(np.abs(expected_s / measured_s - 1.0)))

    def predict(self, shape: BatchShape) -> Prediction:
        factor = float(np.interp(self._clock.now(), self.drift_at_s, self.drift))
        return Prediction(self._base.predict(shape).seconds * factor + self._host_s, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Knows already."""
