"""What a served engine has told of its traffic, read back: pieces of ``engine.record.traffic``."""

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
"""Standard deviation over mean absolute deviation, of a normal distribution."""


@dataclass(slots=True)
class Recording:
    """Pieces in the order of time; the last one says what the engine has.

    Raises:
        ValueError: there is no piece, or the last one does not say it.
    """

    pieces: Sequence[TrafficPiece]
    present: Present = field(init=False)

    def __post_init__(self) -> None:
        if not self.pieces or self.pieces[-1].present is None:
            raise ValueError("the recording does not end with what the engine has")
        self.present = self.pieces[-1].present

    @classmethod
    def decode(cls, pieces: Sequence[bytes]) -> "Recording":
        return cls([traffic_decoder.decode(piece) for piece in pieces])

    @property
    def now_s(self) -> float:
        return self.pieces[-1].now_s

    @property
    def first_s(self) -> float:
        """From here on everything is known: the end of the first piece."""
        return self.pieces[0].now_s

    @property
    def is_paused(self) -> bool:
        """Whether offline work is, at the end."""
        return self.pieces[-1].is_paused

    @property
    def steady_s(self) -> float:
        """Since when offline work has been paused, or not been, as it is at the end."""
        same = list(takewhile(lambda piece: piece.is_paused == self.is_paused, reversed(self.pieces)))
        return same[-1].now_s

    def served(self, since_s: float) -> list[ServedRequest]:
        """Requests of which something was left to do at that time, those without an end last."""
        ended = [one for piece in self.pieces if piece.now_s >= since_s for one in piece.ended]
        return [one for one in ended if one.ended_s >= since_s] + self.present.requests

    def offline_tokens_per_s(self, window_s: Window) -> float:
        """Logical, as it was."""
        times_s = [piece.now_s for piece in self.pieces]
        counts = [piece.offline_tokens for piece in self.pieces]
        before, after = np.interp(window_s, times_s, counts).tolist()
        return (after - before) / (window_s[1] - window_s[0])

    # ---- the device ----

    def recipes(self, since_s: float) -> list[tuple[float, Recipe]]:
        """Step times from that time on, each with the time since which they hold."""
        known = [(piece.now_s, piece.costs) for piece in self.pieces if piece.costs is not None]
        later = [(at_s, recipe) for at_s, recipe in known if at_s > since_s]
        earlier = [recipe for at_s, recipe in known if at_s <= since_s]
        return [(since_s, earlier[-1] if earlier else known[0][1]), *later]

    def profile(self, window_s: Window) -> DeviceProfile:
        """This engine as a device, with the mean of its step times in the window."""
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
            planning=PlanningCost(host_s / steps if steps else 0.0),
            tile_tokens=models[len(models) // 2].tile_tokens,
            costs={regime.value: cost for regime, cost in models[len(models) // 2].costs.items()},
        )

    def errors(self, since_s: float) -> "list[tuple[float, StepErrors]]":
        """By how much steps were off from that time on, each with the time since which they were."""
        found = []
        for before, piece in pairwise(self.pieces):
            if piece.now_s > since_s and piece.errors:
                found.append((max(before.now_s, since_s), StepErrors.of([piece])))
        return found

    def step_noise(self, window_s: Window) -> float:
        """Standard deviation of the logarithm of a step's time over its prediction."""
        return StepErrors.of(self._inside(window_s)).noise

    def _inside(self, window_s: Window) -> list[TrafficPiece]:
        return [piece for piece in self.pieces if window_s[0] < piece.now_s <= window_s[1]]


class StepErrors:
    """Measured over predicted times, to draw from: in any order, but as often as they were. Chance alone would make of
    24 steps that stalled 17 or 31, and of the requests in time as many more or fewer.

    Long steps may be off by less than short ones. A draw knows nothing of that, so all are scaled to have the mean that
    the steps had together.

    Args:
        counts: logarithms in units of ``ERROR_UNIT`` -> steps.
        mean: time of all these steps over what was predicted for them.
    """

    def __init__(self, counts: Mapping[int, int], mean: float = 1.0) -> None:
        self._counts = counts
        self._left: list[int] = []
        """Not drawn yet, of all."""
        total = sum(counts.values())
        off = sum(abs(units) * count for units, count in counts.items())
        self.noise = SIGMA_OF_MEAN * ERROR_UNIT * off / total if total else 0.0
        """Standard deviation of the logarithm, if that were a normal distribution."""
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
        """1 where no step is known."""
        if not self._counts:
            return 1.0
        if not self._left:
            self._left = [units for units, count in self._counts.items() for _ in range(count)]
            random.shuffle(self._left)
        return self._scale * math.exp(ERROR_UNIT * self._left.pop())


class _Since(Generic[T]):
    """What holds now, of things that each hold since a time, ascending; the first one also before."""

    def __init__(self, things: Sequence[tuple[float, T]]) -> None:
        self._things = things
        self._next = 1
        self.now = things[0][1]

    def go_to(self, now_s: float) -> None:
        while self._next < len(self._things) and self._things[self._next][0] <= now_s:
            self.now = self._things[self._next][1]
            self._next += 1


class StepTimes(EngineObserver):
    """How long steps took, moment by moment: the machine's speed of then. Implements ``CostModel``.

    Args:
        recipes: each with the time since which it holds.
        origin_s: the time at which the simulation's clock is at 0.
        errors: likewise; each prediction is of one step, which is off by one of these.
        seed: of the draws.
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
        """It knows."""


def is_online(one: ServedRequest) -> bool:
    return request_class(one.tier) is RequestClass.ONLINE


def num_sampled(one: ServedRequest) -> int:
    """Tokens that were sampled: the end of sequence counts, which a client waits for."""
    return one.output_tokens + (one.reason is FinishReason.STOP)


def _model(recipe: Recipe) -> RooflineModel:
    model = build_cost_model(recipe)
    assert isinstance(model, RooflineModel)
    return model
