"""Shared parts of the iteration-time models, and a constant model for tests.

The models are in this folder: ``roofline`` (ours), ``paper_models`` (Echo, BROS, HyGen), ``online_fit``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.steps.plan import BatchShape


class Regime(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def regime_of(shape: BatchShape) -> Regime:
    """The regime of a step. An empty step counts as decode."""
    if shape.prefill_requests == 0:
        return Regime.DECODE
    return Regime.MIXED if shape.decode_requests else Regime.PREFILL


def read_kv_tokens(shape: BatchShape) -> int:
    """KV tokens that a step reads: those of decodes, and the context before prefill chunks. A read that serves several
    decodes counts once."""
    num_tokens = shape.decode_context_tokens + shape.prefill_context_tokens - shape.shared_prefix_tokens
    return num_tokens if num_tokens > 0 else 0


def raggedness(shape: BatchShape) -> float:
    """How much the decodes differ in length, in 0..1: 0 if all are equal; another decode never lowers it.

    A kernel runs decodes of similar length together, so ragged ones run in more pieces: soon two or three, then few
    more. With x = requests - KV tokens / longest, the requests missing to equal lengths: x / (x + 1).
    """
    if shape.longest_decode_tokens == 0:
        return 0.0
    missing = shape.decode_requests - shape.decode_context_tokens / shape.longest_decode_tokens
    return missing / (missing + 1.0) if missing > 0.0 else 0.0


@dataclass(slots=True, frozen=True)
class StepSample:
    """A measured step."""

    shape: BatchShape
    seconds: float


def mean_relative_error(model: CostModel, samples: Sequence[StepSample]) -> float:
    """Mean of |predicted - measured| / measured; NaN without samples."""
    if not samples:
        return float("nan")
    return sum(abs(model.predict(s.shape).seconds - s.seconds) / s.seconds for s in samples) / len(samples)


class ConstantCostModel:
    """A model in which every step takes the same time, for tests."""

    def __init__(self, seconds: float, margin_s: float = 0.0) -> None:
        self._prediction = Prediction(seconds, margin_s)

    def predict(self, shape: BatchShape) -> Prediction:
        return self._prediction

    def observe(self, shape: BatchShape, seconds: float) -> None:
        pass
