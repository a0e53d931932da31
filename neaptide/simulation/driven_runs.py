"""One load on the real engine and on the simulated one: for predictions that are then measured."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from neaptide.engine.clock import Clock
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.messages import AddBatch, AddRequest
from neaptide.engine.observer import EngineObserver
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import BatchShape, StepResult
from neaptide.engine.steps.step import Step as EngineStep
from neaptide.executors.simulated.trace_executor import StepTally, TraceExecutor
from neaptide.loadgen.client.client import poisson_arrivals
from neaptide.loadgen.percentiles import percentiles
from neaptide.simulation.measures import Copied, Measures
from neaptide.simulation.offline_feed import NO_DEADLINE_S

ONLINE_IN, ONLINE_OUT = 128, 32
OFFLINE_IN, OFFLINE_OUT = 256, 64
FIRST_TOKEN_ID = 10
"""Special tokens lie below."""
WARM_UP_SHARE = 0.2
"""Of the run, before the window of measurement: what is known of the machine's drift comes from there."""
STRETCH_STEPS = 40
"""Of known steps, drawn together: a machine is slow for seconds, and an engine that notices leaves itself a smaller
margin than one whose every step is off by chance."""

DRAWS = 9
"""Simulations of a run, each with another draw of the scatter of steps; a measure is the median over them."""
ERRORS = {"tokens/s": 0.03, "p50": 0.05, "p99": 0.15}
"""Largest relative errors that a simulation may have."""
NEVER = 1 << 30
"""Output tokens of a request that only its limit ends."""


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

    @property
    def end_s(self) -> float:
        return self.start_s + self.host_s + self.seconds


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

    @property
    def warm_up_s(self) -> float:
        return WARM_UP_SHARE * self.duration_s

    def steps_before_window(self) -> list[Step]:
        """Those that had ended when the window of measurement began."""
        return [step for step in self.steps if step.end_s <= self.warm_up_s]

    def steps_in_window(self) -> list[Step]:
        return [step for step in self.steps if self.warm_up_s < step.end_s <= self.duration_s]

    def tokens_per_s(self, *, online: bool) -> float:
        """Computed tokens in the window, per second."""
        _, values = self.cumulative_tokens(online=online)
        begin, end = np.searchsorted(self.step_ends_s, (self.warm_up_s, self.duration_s))
        seconds = self.step_ends_s[end - 1] - self.step_ends_s[begin]
        return float(values[end - 1] - values[begin]) / float(seconds)

    @property
    def step_ends_s(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([step.end_s for step in self.steps])

    def cumulative_tokens(self, *, online: bool) -> tuple[list[float], list[float]]:
        """Times and tokens computed until then."""
        offline = np.cumsum(self.measures.steps((-math.inf, math.inf))["computed_tokens"])
        total = np.cumsum([step.shape.num_tokens for step in self.steps])
        tokens = total - offline if online else offline
        return self.step_ends_s.tolist(), tokens.tolist()


def online_percentiles(measures: Measures, run: Outcome) -> dict[str, dict[str, float]]:
    """Seconds, of the requests that arrived after the warm-up of ``run``."""
    since_s = run.start_s + run.warm_up_s
    records = [r for r in measures.online.values() if r.arrival_s >= since_s]
    ttft_s = [r.first_s - r.arrival_s for r in records]
    tpot_s = [r.tpot_s for r in records if r.tpot_s is not None]
    return {name: percentiles(values)._asdict() for name, values in (("TTFT", ttft_s), ("TPOT", tpot_s))}


class Shapes(EngineObserver):
    """Keeps the shape of the step that was committed last."""

    def __init__(self) -> None:
        self.last = BatchShape()

    def committed(self, step: EngineStep, result: StepResult, scheduler: Scheduler) -> None:
        self.last = step.plan.shape


def drive(core: EngineCore, clock: Clock, load: Load, executor: TraceExecutor | None = None) -> Outcome:
    """Hands the load in as its times come, between steps; returns when every online request has ended.

    Args:
        executor: a simulated one that gives steps up has to be told when the next request comes.
    """
    outcome = Outcome(start_s=clock.now(), duration_s=load.duration_s)
    core.handle(load.offline_batch())
    next_online = 0
    queues = core.scheduler.queues
    shapes = Shapes()
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
        is_last = next_online == len(load.arrivals_s)
        arrival_s = math.inf if is_last else outcome.start_s + load.arrivals_s[next_online]
        if core.plan_at_s > now_s:
            clock.sleep_until(min(core.plan_at_s, arrival_s))
            continue
        if executor is not None:
            executor.next_arrival_s = arrival_s
        outputs = core.step()
        outcome.measures.step(outputs, StepTally(), Copied(), clock.now())
        for stats in outputs.stats:
            host_s = stats.schedule_s + stats.commit_s
            if not stats.is_given_up:
                outcome.steps.append(Step(now_s - outcome.start_s, stats.duration_s, host_s, shapes.last))
        if not outputs.stats:
            clock.sleep_until(now_s + 0.005)


class MachineModel:
    """How long steps take by a profile, corrected by what was known before the window of measurement.

    Implements ``CostModel``. Nothing of the window goes in: what is compared with it must not have seen it.

    Args:
        base: from a calibration.
        known: steps that ended before the window; their times over the base's predictions are the drift.
        drift: False takes the base as it is.
    """

    def __init__(self, base: CostModel, known: Sequence[Step], *, drift: bool = True) -> None:
        self._base = base
        self._host_s = float(np.mean([step.host_s for step in known]))
        measured_s = np.array([step.seconds for step in known])
        predicted_s = np.array([base.predict(step.shape).seconds for step in known])
        measured_drift = float(measured_s.sum() / predicted_s.sum())
        self.drift = measured_drift if drift else 1.0
        residuals = np.log(measured_s / predicted_s)
        self.noise = float(1.4826 * np.median(np.abs(residuals - np.median(residuals))))
        """Standard deviation of the logarithm of one step's time; robust against outliers."""
        # Of mean 1 over the time of the steps, not over the steps: an engine plans shorter ones while the machine is
        # slow, and one that is simulated will do so, too.
        self._factors = measured_s / predicted_s / measured_drift

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(self._base.predict(shape).seconds * self.drift + self._host_s, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learns nothing more."""

    def factors(self, seed: int) -> Iterator[float]:
        """What one step after another takes over its prediction, without end: the known steps' own, stalls and slow
        seconds as they were, in stretches whose order is drawn.

        Blocks of a circular series (Politis and Romano 1992), but each as often as any other: chance alone would make
        of three stalls none or six.
        """
        rng = random.Random(seed)
        while True:
            begin = rng.randrange(len(self._factors))
            series = np.roll(self._factors, -begin)
            stretches = [series[at : at + STRETCH_STEPS] for at in range(0, len(series), STRETCH_STEPS)]
            rng.shuffle(stretches)
            for stretch in stretches:
                yield from stretch.tolist()

    def error(self, steps: Sequence[Step]) -> float:
        """Mean relative error of these steps' times."""
        errors = [abs(self._base.predict(step.shape).seconds * self.drift / step.seconds - 1.0) for step in steps]
        return sum(errors) / len(errors)
