"""What there is to see of a running engine; whatever watches it subscribes here."""

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
    """Told of everything, in the order in which it happens; every method does nothing unless overridden.

    Observers must not change what they see. Recorder, request log, witness, statistics, simulator and ``--explain``
    are observers.
    """

    def warmed_up(self, shape: BatchShape, seconds: float) -> None:
        """The cost model was shown a measured step before the engine's first."""

    def message(self, message: ToEngine, now_s: float) -> None:
        """The engine takes in a message."""

    def refused(self, request_id: str) -> None:
        """A request, or a row, of which the engine was told will never run."""

    def cancelled(self, batch_id: str) -> None:
        """The batch's rows that had started have ended; the others are forgotten."""

    def planning(self, now_s: float) -> None:
        """A step is about to be planned."""

    def row(self, request: Request) -> None:
        """A policy looks at a batch row for the first time."""

    def idle(self, start_s: float, scheduler: Scheduler) -> None:
        """Planning at ``start_s`` found no request that could run."""

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        """The step has been applied and is about to be submitted."""

    def executed(self, step: Step, result: StepResult) -> None:
        """The step is done and about to be committed."""

    def undone(self, step: Step) -> None:
        """The step before this one failed while this one was in flight: its requests compute the same again."""

    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        """In place of ``committed``: the step was given up, and its requests compute the same again."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request that was accepted ends, in a commit or between steps. Its tokens are still there."""

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        """The step's tokens and ends are in."""

    def close(self) -> None:
        """The engine ends."""


EVENTS = tuple(name for name, value in vars(EngineObserver).items() if not name.startswith("_") and callable(value))


class Observers(EngineObserver):
    """Passes every event on to those of its observers that want it; costs nothing for the others."""

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
