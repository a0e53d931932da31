"""What iteration-time models have in common, and the plain linear one.

The models live beside this file: ``roofline`` (ours), ``paper_models`` (Echo, BROS, HyGen), ``online_fit``.

``LinearCostModel``: how long a step takes, learned from steps that were measured.

``T = c0 + c1*tokens + c2*prefill attention pairs + c3*decode context tokens + c4*decode requests``, all
coefficients non-negative. Fitted by exponentially forgetting least squares on the relative error, so that a
drifting machine is followed and short steps count as much as long ones.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from neaptide.engine.batch import BatchShape
from neaptide.engine.interfaces import CostModel, Prediction

MAX_SWEEPS = 50
"""Enough to stay close: the next refit starts where this one ended."""
MAX_MARGIN = 1.0
"""On a machine this noisy a wider margin would only stop offline work."""

Vector = npt.NDArray[np.float64]


class Regime(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def regime_of(shape: BatchShape) -> Regime:
    """An empty step counts as decode."""
    if shape.prefill_requests == 0:
        return Regime.DECODE
    return Regime.MIXED if shape.decode_requests else Regime.PREFILL


@dataclass(slots=True, frozen=True)
class Sample:
    """A step that was measured."""

    shape: BatchShape
    seconds: float


def mean_relative_error(model: CostModel, samples: Sequence[Sample]) -> float:
    """Mean of |predicted - measured| / measured; NaN without samples."""
    if not samples:
        return float("nan")
    return sum(abs(model.predict(s.shape).seconds - s.seconds) / s.seconds for s in samples) / len(samples)


def features(shape: BatchShape) -> tuple[float, float, float, float, float]:
    """Scaled to one order of magnitude, so that the solver's one tolerance fits all."""
    return (
        1.0,
        shape.num_tokens / 1e2,
        shape.prefill_attention_pairs / 1e5,
        shape.decode_context_tokens / 1e4,
        shape.decode_requests / 1e1,
    )


def nonnegative_least_squares(gram: list[list[float]], target: list[float], start: list[float]) -> list[float]:
    """Minimises ``x'Gx/2 - t'x`` over x >= 0 by coordinate descent (G positive semi-definite, small).

    Plain floats: at this size numpy's calls would cost more than the arithmetic, and it runs between steps.
    """
    x = list(start)
    for _ in range(MAX_SWEEPS):
        largest_change = 0.0
        for i, row in enumerate(gram):
            if row[i] <= 0.0:
                continue
            slope = target[i] - sum(g * v for g, v in zip(row, x, strict=True))
            new = max(0.0, x[i] + slope / row[i])
            largest_change = max(largest_change, abs(new - x[i]))
            x[i] = new
        if largest_change < 1e-9:
            break
    return x


class ConstantCostModel:
    """Every step takes the same time. For tests."""

    def __init__(self, seconds: float) -> None:
        self._prediction = Prediction(seconds, 0.0)

    def predict(self, shape: BatchShape) -> Prediction:
        return self._prediction

    def observe(self, shape: BatchShape, seconds: float) -> None:
        pass


class LinearCostModel:
    """Implements ``CostModel``. Starts from a guess and learns from every step.

    Args:
        alpha: the margin is set so that a share of about ``alpha`` of recent steps took longer than predicted
            plus margin.
    """

    FORGETTING = 0.995
    REFIT_EVERY = 8
    WINDOW_STEPS = 200

    def __init__(self, alpha: float = 0.05) -> None:
        self._alpha = alpha
        self._fast: list[float] = [5e-3, 1e-2, 1e-3, 1e-3, 1e-3]
        self._coefficients = np.array(self._fast)
        # A weak pull towards the first guess keeps features that never varied from drifting.
        self._gram = np.eye(len(self._fast)) * 1e-3
        self._target: Vector = self._gram @ self._coefficients
        self._recent: deque[Vector] = deque(maxlen=self.WINDOW_STEPS)
        """Features over seconds: what the fit should map to 1."""
        self._relative_margin = 0.1
        self._num_observed = 0
        self._refit()

    def predict(self, shape: BatchShape) -> Prediction:
        c0, c1, c2, c3, c4 = self._fast
        _, tokens, pairs, context, decodes = features(shape)
        seconds = c0 + c1 * tokens + c2 * pairs + c3 * context + c4 * decodes
        return Prediction(seconds, seconds * self._relative_margin)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        if seconds <= 0.0:
            return
        x = np.array(features(shape)) / seconds
        self._recent.append(x)
        self._gram = self.FORGETTING * self._gram + np.outer(x, x)
        self._target = self.FORGETTING * self._target + x
        self._num_observed += 1
        if self._num_observed % self.REFIT_EVERY == 0:
            self._refit()

    def _refit(self) -> None:
        self._fast = nonnegative_least_squares(self._gram.tolist(), self._target.tolist(), self._fast)
        self._coefficients = np.array(self._fast)
        if len(self._recent) >= self.REFIT_EVERY:
            # Errors of the present coefficients on recent steps, not those made while they were being learnt.
            predicted_over_measured = np.array(self._recent) @ self._coefficients
            errors = 1.0 / np.maximum(predicted_over_measured, 1e-3) - 1.0
            self._relative_margin = min(max(float(np.quantile(errors, 1.0 - self._alpha)), 0.0), MAX_MARGIN)
