"""Events of a running engine, to which observers subscribe."""

from collections.abc import Callable, Sequence
from typing import Any

from neaptide.engine.messages import ToEngine
from neaptide.engine.params import FinishReason
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape, StepResult
from neaptide.engine.steps.step import Step


class EngineObserver:
    """Receives every event of the engine, in order; each method does nothing unless overridden.

    Observers must not change what they see. Examples are recorder, request log, crash marker, statistics, simulator
    and ``--explain``.
    """

    def warmed_up(self, shape: BatchShape, seconds: float) -> None:
        """The cost model has learned from a warm-up step."""

    def message(self, message: ToEngine, now_s: float) -> None:
        """The engine takes in a message."""

    def refused(self, request_id: str) -> None:
        """A request or a row that the engine received will never run."""

    def cancelled(self, batch_id: str) -> None:
        """The batch is cancelled: its started rows have ended, the others are dropped."""

    def planning(self, now_s: float) -> None:
        """A step is about to be planned."""

    def row(self, request: Request) -> None:
        """A policy has made a batch row into a request for the first time."""

    def idle(self, start_s: float, scheduler: Scheduler) -> None:
        """Planning at ``start_s`` found no request that could run."""

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        """The step has been applied and is about to be submitted."""

    def executed(self, step: Step, result: StepResult) -> None:
        """The step is done and about to be committed."""

    def undone(self, step: Step) -> None:
        """The step was undone because the step before it failed; its requests compute the same tokens again."""

    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        """The step was aborted, so ``committed`` does not follow; its requests compute the same tokens again."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """An accepted request ends, in a commit or between steps. Its tokens are still available."""

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        """The step's tokens have been added and its ended requests removed."""

    def close(self) -> None:
        """The engine ends."""


EVENTS = tuple(name for name, value in vars(EngineObserver).items() if not name.startswith("_") and callable(value))


class Observers(EngineObserver):
    """Passes each event to the observers that override it, at no cost to the others."""

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        self._observers: list[EngineObserver] = []
        self.subscribe(*observers)

    def subscribe(self, *observers: EngineObserver) -> None:
        self._observers += observers
        for event in EVENTS:
            own = getattr(EngineObserver, event)
            wanted = [getattr(o, event) for o in self._observers if getattr(type(o), event) is not own]
            setattr(self, event, _fan_out(wanted))


def _fan_out(listeners: list[Callable[..., None]]) -> Callable[..., None]:
    if len(listeners) == 1:
        return listeners[0]

    def tell(*args: Any) -> None:
        for listener in listeners:
            listener(*args)

    return tell
