"""Reads a served engine's recorded traffic: pieces of ``engine.record.traffic``."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from random import Random
from typing import Generic, TypeVar

import numpy as np

from neaptide.engine.interfaces import Prediction
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason, RequestClass, request_class
from neaptide.engine.record.traffic import ERROR_UNIT, Present, ServedRequest, TrafficPiece, traffic_decoder
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import DeviceProfile, PlanningCost
from neaptide.estimator.recipes import Recipe, build_cost_model
from neaptide.simulation.measures import Window

T = TypeVar("T")
SIGMA_OF_MEAN = math.sqrt(math.pi / 2)
"""Standard deviation over mean absolute deviation, for a normal distribution."""


@dataclass(slots=True)
class TrafficRecording:
    """Pieces in time order; the last one holds the engine's present state.

    Raises:
        ValueError: there is no piece, or the last one lacks the present state.
    """

    pieces: Sequence[TrafficPiece]
    present: Present = field(init=False)

    def __post_init__(self) -> None:
        if not self.pieces or self.pieces[-1].present is None:
            raise ValueError("the recording does not end with the engine's state")
        self.present = self.pieces[-1].present

    @classmethod
    def decode(cls, pieces: Sequence[bytes]) -> "TrafficRecording":
        return cls([traffic_decoder.decode(piece) for piece in pieces])

    @property
    def now_s(self) -> float:
        return self.pieces[-1].now_s

    @property
    def first_s(self) -> float:
        """Time from which on everything is known: the end of the first piece."""
        return self.pieces[0].now_s

    @property
    def is_paused(self) -> bool:
        """Whether offline work is paused at the end."""
        return self.pieces[-1].is_paused

    @property
    def steady_s(self) -> float:
        """Time since which the pause state has been as at the end."""
        same = list(takewhile(lambda piece: piece.is_paused == self.is_paused, reversed(self.pieces)))
        return same[-1].now_s

    def served(self, since_s: float) -> list[ServedRequest]:
        """Requests with remaining work at that time; those without an end are last."""
        ended = [one for piece in self.pieces if piece.now_s >= since_s for one in piece.ended]
        return [one for one in ended if one.ended_s >= since_s] + self.present.requests

    def offline_tokens_per_s(self, window_s: Window) -> float:
        """Logical offline tokens per second, as recorded."""
        times_s = [piece.now_s for piece in self.pieces]
        counts = [piece.offline_tokens for piece in self.pieces]
        before, after = np.interp(window_s, times_s, counts).tolist()
        return (after - before) / (window_s[1] - window_s[0])

    # ---- the device ----

    def recipes(self, since_s: float) -> list[tuple[float, Recipe]]:
        """Step time recipes from that time on, each with its start."""
        known = [(piece.now_s, piece.costs) for piece in self.pieces if piece.costs is not None]
        later = [(at_s, recipe) for at_s, recipe in known if at_s > since_s]
        earlier = [recipe for at_s, recipe in known if at_s <= since_s]
        return [(since_s, earlier[-1] if earlier else known[0][1]), *later]

    def profile(self, window_s: Window) -> DeviceProfile:
        """This engine as a device, with its mean step times in the window."""
        models = [_model(recipe) for _, recipe in self.recipes(window_s[0])]
        inside = self._inside(window_s)
        steps, host_s = sum(piece.num_steps for piece in inside), sum(piece.host_s for piece in inside)
        return DeviceProfile(
            name="this server",
            source="measured",
            device="",
            model="",
            dtype="",
            date="",
            commit="",
            kv_bytes_per_token=1,
            num_blocks=self.present.num_blocks,
            block_size=self.present.block_size,
            shared_reads=self.present.shared_reads,
            planning=PlanningCost(host_s / steps if steps else 0.0),
            tile_tokens=models[len(models) // 2].tile_tokens,
            costs={regime.value: cost for regime, cost in models[len(models) // 2].costs.items()},
        )

    def errors(self, since_s: float) -> "list[tuple[float, StepErrors]]":
        """Step errors from that time on, each with its start."""
        found = []
        for before, piece in pairwise(self.pieces):
            if piece.now_s > since_s and piece.errors:
                found.append((max(before.now_s, since_s), StepErrors.of([piece])))
        return found

    def step_noise(self, window_s: Window) -> float:
        """Standard deviation of the log of measured over predicted step time."""
        return StepErrors.of(self._inside(window_s)).noise

    def _inside(self, window_s: Window) -> list[TrafficPiece]:
        return [piece for piece in self.pieces if window_s[0] < piece.now_s <= window_s[1]]


class StepErrors:
    """Measured over predicted times, drawn in random order but with their exact frequencies.

    Independent draws would turn 24 stalled steps into 17 or 31, and change the requests in time accordingly. Long steps
    may deviate less than short ones, which a draw does not know. So all draws are scaled to the steps' common mean.

    Args:
        counts: log of the ratio in units of ``ERROR_UNIT`` -> steps.
        mean: total measured over total predicted time of these steps.
    """

    def __init__(self, counts: Mapping[int, int], mean: float = 1.0) -> None:
        self._counts = counts
        self._left: list[int] = []
        """Values of the current round that have not been drawn."""
        total = sum(counts.values())
        off = sum(abs(units) * count for units, count in counts.items())
        self.noise = SIGMA_OF_MEAN * ERROR_UNIT * off / total if total else 0.0
        """Standard deviation of the log, assuming a normal distribution."""
        factors = sum(math.exp(ERROR_UNIT * units) * count for units, count in counts.items())
        self._scale = mean * total / factors if total else 1.0

    @classmethod
    def of(cls, pieces: Sequence[TrafficPiece]) -> "StepErrors":
        counts: Counter[int] = Counter()
        for piece in pieces:
            counts.update(piece.errors)
        predicted_s = sum(piece.predicted_s for piece in pieces)
        return cls(counts, sum(piece.measured_s for piece in pieces) / predicted_s if predicted_s else 1.0)

    def draw(self, random: Random) -> float:
        """The next ratio; 1 if no step is known."""
        if not self._counts:
            return 1.0
        if not self._left:
            self._left = [units for units, count in self._counts.items() for _ in range(count)]
            random.shuffle(self._left)
        return self._scale * math.exp(ERROR_UNIT * self._left.pop())


class _Since(Generic[T]):
    """The value that holds now, of values with ascending start times; the first one also holds before its start."""

    def __init__(self, things: Sequence[tuple[float, T]]) -> None:
        self._things = things
        self._next = 1
        self.now = things[0][1]

    def go_to(self, now_s: float) -> None:
        while self._next < len(self._things) and self._things[self._next][0] <= now_s:
            self.now = self._things[self._next][1]
            self._next += 1


class StepTimes(EngineObserver):
    """Recorded step times by moment, which reflect the machine's speed at that time. Implements ``CostModel``.

    Args:
        recipes: each with its start time.
        origin_s: time at which the simulation's clock is 0.
        errors: each with its start time. Each prediction is for one step, with one of these errors.
        seed: for drawing errors.
    """

    def __init__(
        self,
        recipes: Sequence[tuple[float, Recipe]],
        origin_s: float,
        errors: Sequence[tuple[float, StepErrors]] = (),
        seed: int = 0,
    ) -> None:
        self._models = _Since([(at_s - origin_s, _model(recipe)) for at_s, recipe in recipes])
        self._errors = _Since([(-math.inf, StepErrors({})), *((at_s - origin_s, one) for at_s, one in errors)])
        self._random = Random(seed)

    def planning(self, now_s: float) -> None:
        self._models.go_to(now_s)
        self._errors.go_to(now_s)

    def predict(self, shape: BatchShape) -> Prediction:
        seconds = self._models.now.predict(shape).seconds
        return Prediction(seconds * self._errors.now.draw(self._random), 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Does nothing: the step times are known."""


def is_online(one: ServedRequest) -> bool:
    return request_class(one.tier) is RequestClass.ONLINE


def num_sampled(one: ServedRequest) -> int:
    """Sampled tokens, including the end of sequence, which a client waits for."""
    return one.output_tokens + (one.reason is FinishReason.STOP)


def _model(recipe: Recipe) -> RooflineModel:
    model = build_cost_model(recipe)
    assert isinstance(model, RooflineModel)
    return model
