"""Protocols at the engine's borders. The engine owns them, executors and estimator implement them, ``launch`` wires
them."""

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
        """Starts a step. If it raises, or its handle does, the same requests may come again in other steps.

        A plan without parts only reports which requests ended.
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
        """Notes the arrival of an online request."""
        ...

    def headroom_blocks(self, now_s: float) -> int:
        """Blocks for online work, those it holds included. Offline work may use only the rest."""
        ...


class MessageSource(Protocol):
    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        """Messages that have arrived; waits ``timeout_s`` at most for the first."""
        ...


class MessageSink(Protocol):
    def send(self, message: FromEngine) -> None: ...
