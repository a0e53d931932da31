"""Runs one load on the real engine and on the simulated one, to compare predictions with measurements."""

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
from neaptide.simulation.measures import Measures
from neaptide.simulation.offline_feed import NO_DEADLINE_S

ONLINE_IN, ONLINE_OUT = 128, 32
OFFLINE_IN, OFFLINE_OUT = 256, 64
FIRST_TOKEN_ID = 10
"""Special tokens are below this id."""
WARM_UP_SHARE = 0.2
"""Fraction of the run before the measurement window; it shows how far the machine's speed drifted."""
STRETCH_STEPS = 40
"""Number of known steps drawn together. A machine is slow for seconds at a time, and an engine that notices it shortens
its steps; independent errors of single steps would not show that."""

DRAWS = 9
"""Simulations of a run, each with other draws of step times. A measure is the median over them."""
ERRORS = {"tokens/s": 0.03, "p50": 0.05, "p99": 0.15}
"""Largest relative errors that a simulation may have."""
NEVER = 1 << 30
"""Output tokens of a request that only its limit ends."""


@dataclass(slots=True, frozen=True)
class DrivenLoad:
    """The requests of a run. Times are in seconds from its start."""

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
    ) -> "DrivenLoad":
        """Poisson arrivals over the whole duration, and more offline rows than it can do; seeded."""
        rng = random.Random(0)

        def prompt(num_tokens: int) -> list[int]:
            return [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(num_tokens)]

        arrivals_s = poisson_arrivals(rate_rps, duration_s, seed=0)
        stem = str(directory / "offline")
        with TokenFileWriter(stem, is_durable=False) as writer:
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
class DrivenStep:
    """A step of a run. Times are in seconds from the run's start."""

    start_s: float
    seconds: float
    """Time in the executor."""
    host_s: float
    """Time of planning and committing."""
    shape: BatchShape

    @property
    def end_s(self) -> float:
        return self.start_s + self.host_s + self.seconds


@dataclass(slots=True)
class Outcome:
    """The result of one run."""

    measures: Measures = field(default_factory=Measures)
    steps: list[DrivenStep] = field(default_factory=list)
    start_s: float = 0.0
    """Start on the run's clock."""
    duration_s: float = 0.0
    """Requested duration; the run continues until its online requests have ended."""
    dry: bool = False
    """Whether the offline rows ran out before the end."""

    @property
    def warm_up_s(self) -> float:
        return WARM_UP_SHARE * self.duration_s

    def steps_before_window(self) -> list[DrivenStep]:
        """The steps that ended before the measurement window."""
        return [step for step in self.steps if step.end_s <= self.warm_up_s]

    def steps_in_window(self) -> list[DrivenStep]:
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
        """Times, and the tokens computed until then."""
        offline = np.cumsum(self.measures.steps((-math.inf, math.inf))["computed_tokens"])
        total = np.cumsum([step.shape.num_tokens for step in self.steps])
        tokens = total - offline if online else offline
        return self.step_ends_s.tolist(), tokens.tolist()


def online_percentiles(measures: Measures, run: Outcome) -> dict[str, dict[str, float]]:
    """Percentiles in seconds, over requests that arrived after the warm-up of ``run``."""
    since_s = run.start_s + run.warm_up_s
    records = [r for r in measures.online.values() if r.arrival_s >= since_s]
    ttft_s = [r.first_s - r.arrival_s for r in records]
    tpot_s = [r.tpot_s for r in records if r.tpot_s is not None]
    return {name: percentiles(values)._asdict() for name, values in (("TTFT", ttft_s), ("TPOT", tpot_s))}


class Shapes(EngineObserver):
    """Keeps the shape of the last committed step."""

    def __init__(self) -> None:
        self.last = BatchShape()

    def committed(self, step: EngineStep, result: StepResult, scheduler: Scheduler) -> None:
        self.last = step.plan.shape


def drive(core: EngineCore, clock: Clock, load: DrivenLoad, executor: TraceExecutor | None = None) -> Outcome:
    """Runs the load: hands requests in between steps when they are due. Returns when every online request has ended.

    Args:
        executor: a simulated executor with abortable steps; it needs the time of the next arrival.
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
        outcome.measures.step(outputs, StepTally(), 0, clock.now())
        for stats in outputs.stats:
            host_s = stats.schedule_s + stats.commit_s
            if not stats.is_aborted:
                outcome.steps.append(DrivenStep(now_s - outcome.start_s, stats.duration_s, host_s, shapes.last))
        if not outputs.stats:
            clock.sleep_until(now_s + 0.005)


class MachineModel:
    """Step times of a profile, corrected by the steps before the measurement window.

    Implements ``CostModel``. Nothing from the window is used, since the model is compared with it.

    Args:
        base: model from a calibration.
        known: steps that ended before the window; the drift is their time over the base's predictions.
        drift: False uses the base unchanged.
    """

    def __init__(self, base: CostModel, known: Sequence[DrivenStep], *, drift: bool = True) -> None:
        self._base = base
        self._host_s = float(np.mean([step.host_s for step in known]))
        measured_s = np.array([step.seconds for step in known])
        predicted_s = np.array([base.predict(step.shape).seconds for step in known])
        measured_drift = float(measured_s.sum() / predicted_s.sum())
        self.drift = measured_drift if drift else 1.0
        residuals = np.log(measured_s / predicted_s)
        self.noise = float(1.4826 * np.median(np.abs(residuals - np.median(residuals))))
        """Standard deviation of the logarithm of one step's time; robust against outliers."""
        # The mean is 1 over the steps' time, not over the steps. An engine plans shorter steps while the machine is
        # slow, and so does a simulated one.
        self._factors = measured_s / predicted_s / measured_drift

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(self._base.predict(shape).seconds * self.drift + self._host_s, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Ignores further steps."""

    def factors(self, seed: int) -> Iterator[float]:
        """Yields, without end, the factors of steps' times over their predictions: the known steps' own, in blocks of
        random order.

        The blocks are those of a circular series (Politis and Romano 1992), but each occurs equally often. Otherwise
        three stalls could become none or six by chance.
        """
        rng = random.Random(seed)
        while True:
            begin = rng.randrange(len(self._factors))
            series = np.roll(self._factors, -begin)
            stretches = [series[at : at + STRETCH_STEPS] for at in range(0, len(series), STRETCH_STEPS)]
            rng.shuffle(stretches)
            for stretch in stretches:
                yield from stretch.tolist()

    def error(self, steps: Sequence[DrivenStep]) -> float:
        """Mean relative error of these steps' times."""
        errors = [abs(self._base.predict(step.shape).seconds * self.drift / step.seconds - 1.0) for step in steps]
        return sum(errors) / len(errors)
