"""Iteration-time models of the papers, for comparison: Echo, BROS, HyGen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from neaptide.engine.arrays import BoolArray
from neaptide.engine.interfaces import Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import StepSample
from neaptide.estimator.cost.least_squares import Array, fit_relative

LAMBDAS = tuple(i / 10 for i in range(11))
ALTERNATIONS = 5
FIRST_FLOORS = (0.1, 0.3, 0.5)
"""Quantiles of the times of steps without decodes, as starting values for Echo's floor."""


def _matrix(rows: Sequence[tuple[float, ...]]) -> Array:
    return np.array(rows, dtype=np.float64)


def _seconds(samples: Sequence[StepSample]) -> Array:
    if not samples:
        raise ValueError("a model cannot be fitted without samples")
    return np.array([sample.seconds for sample in samples])


class EchoModel:
    """Echo's estimator (Echo section 5.2, equations 6 to 8).

    ``T_p(l) = max(alpha l^2 + beta l, c)``; ``T_d(L) = gamma max(L) + delta mean(L)``; ``T = lambda max(T_p, T_d) + (1
    - lambda) (T_p + T_d)``. The paper does not say whether c is a floor or a summand; ``constant`` selects one. As
    published, the number of decodes does not matter. ``l^2`` is taken as twice the attention pairs, so that chunks and
    several prompts count fairly. ``max(L)`` is over the whole batch.
    """

    def __init__(self, constant: Literal["max", "sum"] = "max") -> None:
        self.constant = constant
        self.alpha = self.beta = self.c = self.gamma = self.delta = self.blend = 0.0

    def predict(self, shape: BatchShape) -> Prediction:
        prefill_s, decode_s = self._prefill_s(shape), self._decode_s(shape)
        longer_s = max(prefill_s, decode_s)
        return Prediction(self.blend * longer_s + (1.0 - self.blend) * (prefill_s + decode_s), 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Does nothing: the paper's estimator does not learn from steps."""

    def _prefill_s(self, shape: BatchShape) -> float:
        if shape.prefill_requests == 0:
            return 0.0
        work_s = self.alpha * 2 * shape.prefill_attention_pairs + self.beta * shape.prefill_tokens
        return work_s + self.c if self.constant == "sum" else max(work_s, self.c)

    def _decode_s(self, shape: BatchShape) -> float:
        if shape.decode_requests == 0:
            return 0.0
        return self.gamma * shape.max_context_tokens + self.delta * shape.decode_context_tokens / shape.decode_requests

    def fit(self, samples: Sequence[StepSample]) -> None:
        """Fits all six values: lambda over a grid, the others by alternating least squares from several starting
        floors.

        Raises:
            ValueError: there are no samples.
        """
        seconds, steps = _seconds(samples), _Steps.of(samples)
        best_error, best = float("inf"), (0.0,) * 6
        for blend in LAMBDAS:
            for floor_s in self._first_floors_s(steps, seconds):
                self.alpha = self.beta = self.c = self.gamma = self.delta = 0.0
                self.blend = blend
                self._refit(steps, seconds)
                self.c = max(self.c, floor_s)
                for _ in range(ALTERNATIONS):
                    self._refit(steps, seconds)
                    error = float(np.abs(self._predicted_s(steps) / seconds - 1.0).mean())
                    if error < best_error:
                        best_error = error
                        best = (self.alpha, self.beta, self.c, self.gamma, self.delta, self.blend)
        self.alpha, self.beta, self.c, self.gamma, self.delta, self.blend = best

    def _first_floors_s(self, steps: "_Steps", seconds: Array) -> list[float]:
        """Starting values of the floor: 0, and times of steps without decodes. With a floor of 0 no step is below it,
        so it would stay 0."""
        alone_s = seconds[steps.has_prefill & ~steps.has_decode]
        if self.constant == "sum" or not len(alone_s):
            return [0.0]
        return [0.0, *np.quantile(alone_s, FIRST_FLOORS).tolist()]

    def _parts_s(self, steps: "_Steps") -> tuple[Array, Array, BoolArray]:
        """Prefill and decode times [steps], and where prefill is at its floor."""
        work_s = self.alpha * steps.pairs + self.beta * steps.tokens
        at_floor = steps.has_prefill & (work_s < self.c) if self.constant == "max" else np.zeros_like(steps.has_prefill)
        prefill_s = np.where(at_floor, self.c, work_s + self.c * (self.constant == "sum")) * steps.has_prefill
        return prefill_s, self.gamma * steps.longest + self.delta * steps.mean, at_floor

    def _predicted_s(self, steps: "_Steps") -> Array:
        prefill_s, decode_s, _ = self._parts_s(steps)
        return prefill_s + decode_s - self.blend * np.minimum(prefill_s, decode_s)

    def _refit(self, steps: "_Steps", seconds: Array) -> None:
        """Least squares with each maximum resolved as the current values resolve it."""
        prefill_s, decode_s, at_floor = self._parts_s(steps)
        of_prefill = np.where(prefill_s >= decode_s, 1.0, 1.0 - self.blend)
        of_decode = np.where(decode_s > prefill_s, 1.0, 1.0 - self.blend)
        constant = steps.has_prefill if self.constant == "sum" else at_floor
        prefill = np.column_stack((steps.pairs * ~at_floor, steps.tokens * ~at_floor, constant))
        decode = np.column_stack((steps.longest, steps.mean))
        rows = np.hstack((of_prefill[:, None] * prefill, of_decode[:, None] * decode))
        self.alpha, self.beta, self.c, self.gamma, self.delta = fit_relative(rows, seconds).tolist()


@dataclass(slots=True, frozen=True)
class _Steps:
    """Inputs of Echo's formula; arrays are [steps]."""

    pairs: Array
    """Twice the attention pairs, standing for the squared length."""
    tokens: Array
    longest: Array
    """Longest context; 0 without decodes, like the mean."""
    mean: Array
    has_prefill: BoolArray
    has_decode: BoolArray

    @classmethod
    def of(cls, samples: Sequence[StepSample]) -> "_Steps":
        shapes = [sample.shape for sample in samples]
        decodes = np.array([shape.decode_requests for shape in shapes])
        return cls(
            pairs=2.0 * np.array([shape.prefill_attention_pairs for shape in shapes]),
            tokens=np.array([float(shape.prefill_tokens) for shape in shapes]),
            longest=np.array([float(shape.max_context_tokens) for shape in shapes]) * (decodes > 0),
            mean=np.array([float(shape.decode_context_tokens) for shape in shapes]) / np.maximum(decodes, 1),
            has_prefill=np.array([shape.prefill_requests > 0 for shape in shapes]),
            has_decode=decodes > 0,
        )


class BrosModel:
    """BROS's estimator (BROS section 4, equations 2 to 5): linear in tokens S and context C for each phase.

    ``T = max(T_pre(S_pre, C_pre) + T_dec(S_dec, C_dec), T_swap(Q))``, with ``C_pre = S_pre`` as published, so that
    ``T_pre`` is linear in the prefill tokens only.
    """

    def __init__(self) -> None:
        self.coefficients = [0.0] * 5
        """Prefill: constant, per token. Decode: constant, per request, per context token."""
        self.swap = [0.0, 0.0]
        """Constant, per block."""

    def predict(self, shape: BatchShape) -> Prediction:
        prefill_0, prefill_token, decode_0, decode_request, decode_context = self.coefficients
        seconds = 0.0
        if shape.prefill_requests:
            seconds += prefill_0 + prefill_token * shape.prefill_tokens
        if shape.decode_requests:
            seconds += decode_0 + decode_request * shape.decode_requests + decode_context * shape.decode_context_tokens
        if swapped_blocks := shape.swapped_blocks + shape.copied_aside_blocks:
            seconds = max(seconds, self.swap[0] + self.swap[1] * swapped_blocks)
        return Prediction(seconds, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Does nothing: the paper's estimator does not learn from steps."""

    def fit(self, samples: Sequence[StepSample]) -> None:
        """Fits the coefficients.

        Raises:
            ValueError: there are no samples without swapping.
        """
        plain = [sample for sample in samples if sample.shape.swapped_blocks == 0]
        rows = [self._row(sample.shape) for sample in plain]
        self.coefficients = fit_relative(_matrix(rows), _seconds(plain)).tolist()
        self.swap = [0.0, 0.0]
        # Only steps that take longer than their computation show the cost of a swap.
        bound = [s for s in samples if s.shape.swapped_blocks and s.seconds > 1.1 * self.predict(s.shape).seconds]
        if bound:
            swaps = [(1.0, float(sample.shape.swapped_blocks)) for sample in bound]
            self.swap = fit_relative(_matrix(swaps), _seconds(bound)).tolist()

    def _row(self, shape: BatchShape) -> tuple[float, ...]:
        has_prefill, has_decode = float(shape.prefill_requests > 0), float(shape.decode_requests > 0)
        tokens, requests, context = shape.prefill_tokens, shape.decode_requests, shape.decode_context_tokens
        return has_prefill, float(tokens), has_decode, float(requests), float(context)


class HygenModel:
    """HyGen's predictor: linear in (1, S_p, S_d, S_p^2, S_d^2, N_p, N_d).

    S are the batch's prefill tokens and decode context tokens, N the numbers of requests.
    """

    def __init__(self) -> None:
        self.coefficients = [0.0] * 7

    def predict(self, shape: BatchShape) -> Prediction:
        constant, prefill, decode, prefill_2, decode_2, prefills, decodes = self.coefficients
        tokens, context = shape.prefill_tokens, shape.decode_context_tokens
        seconds = constant + (prefill + prefill_2 * tokens) * tokens + (decode + decode_2 * context) * context
        return Prediction(seconds + prefills * shape.prefill_requests + decodes * shape.decode_requests, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Does nothing: the paper's predictor does not learn from steps."""

    def fit(self, samples: Sequence[StepSample]) -> None:
        """Fits the coefficients.

        Raises:
            ValueError: there are no samples.
        """
        rows = []
        for shape in (sample.shape for sample in samples):
            tokens, context = float(shape.prefill_tokens), float(shape.decode_context_tokens)
            numbers = float(shape.prefill_requests), float(shape.decode_requests)
            rows.append((1.0, tokens, context, tokens**2, context**2, *numbers))
        self.coefficients = fit_relative(_matrix(rows), _seconds(samples)).tolist()
