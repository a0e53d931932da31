"""What a served engine has told of its traffic, read back: pieces of ``engine.record.traffic``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from neaptide.engine.interfaces import Prediction
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason, RequestClass, request_class
from neaptide.engine.record.traffic import Present, ServedRequest, TrafficPiece, traffic_decoder
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import DeviceProfile, PlanningCost
from neaptide.estimator.recipes import Recipe, build_cost_model
from neaptide.simulation.measures import Window

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
        steps, host_s, _ = self._steps(window_s)
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
            costs={regime.value: cost for regime, cost in models[len(models) // 2].costs.items()},
        )

    def step_noise(self, window_s: Window) -> float:
        """Standard deviation of the logarithm of a step's time over its prediction."""
        steps, _, log_error = self._steps(window_s)
        return SIGMA_OF_MEAN * log_error / steps if steps else 0.0

    def _steps(self, window_s: Window) -> tuple[int, float, float]:
        """Their number, the host's time between them, and their errors."""
        inside = [piece for piece in self.pieces if window_s[0] < piece.now_s <= window_s[1]]
        host_s, log_error = (sum(getattr(piece, name) for piece in inside) for name in ("host_s", "log_error"))
        return sum(piece.num_steps for piece in inside), host_s, log_error


class StepTimes(EngineObserver):
    """How long steps took, moment by moment: the machine's speed of then. Implements ``CostModel``.

    Args:
        recipes: each with the time since which it holds.
        origin_s: the time at which the simulation's clock is at 0.
    """

    def __init__(self, recipes: Sequence[tuple[float, Recipe]], origin_s: float) -> None:
        self._models = [(at_s - origin_s, _model(recipe)) for at_s, recipe in recipes]
        self._next = 0
        self._model = self._models[0][1]

    def planning(self, now_s: float) -> None:
        while self._next < len(self._models) and self._models[self._next][0] <= now_s:
            self._model = self._models[self._next][1]
            self._next += 1

    def predict(self, shape: BatchShape) -> Prediction:
        return self._model.predict(shape)

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
