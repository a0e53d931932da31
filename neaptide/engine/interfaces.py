"""The seams. The engine owns the protocols; runner and estimator implement them; the composition root wires them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from neaptide.engine.messages import FromEngine, ToEngine
from neaptide.engine.steps.plan import BatchShape, StepPlan, StepResult


class StepHandle(Protocol):
    def wait(self) -> StepResult:
        """Blocks until the step is done."""
        ...


class Executor(Protocol):
    """Runs steps on one device, in order of submission."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit; block ids are ``0 .. num_blocks - 1``."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts a step. If it raises, or its handle does, the same requests may come again in another company.

        A plan without parts only tells which requests ended.
        """
        ...

    def close(self) -> None: ...


class Prediction(NamedTuple):
    seconds: float
    margin_s: float
    """``P(T > seconds + margin_s) <= alpha`` as far as the model can tell."""


class CostModel(Protocol):
    """How long a step will take."""

    def predict(self, shape: BatchShape) -> Prediction: ...

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learns from a step that was measured."""
        ...


class HeadroomPredictor(Protocol):
    """How many blocks online work will want soon."""

    def observe(self, now_s: float, online_held_blocks: int) -> None: ...

    def observe_arrival(self, now_s: float) -> None:
        """An online request has come."""
        ...

    def headroom_blocks(self, now_s: float) -> int:
        """Blocks that offline work has to leave for online work, those it holds now included."""
        ...


class MessageSource(Protocol):
    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        """Messages that are here, after waiting ``timeout_s`` at most for the first."""
        ...


class MessageSink(Protocol):
    def send(self, message: FromEngine) -> None: ...
