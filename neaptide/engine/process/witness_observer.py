"""Keeps the witness of the steps in flight."""

from neaptide.engine.observer import EngineObserver
from neaptide.engine.process.witness import StepWitness
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step


class WitnessObserver(EngineObserver):
    """Notes the requests of every step that is submitted and not done."""

    def __init__(self, witness: StepWitness) -> None:
        self._witness = witness
        self._in_flight: list[list[str]] = []

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self._in_flight.append(step.plan.request_ids)
        self._note()

    def executed(self, step: Step, result: StepResult) -> None:
        self._is_over(step)

    def undone(self, step: Step) -> None:
        self._is_over(step)

    def _is_over(self, step: Step) -> None:
        self._in_flight = [ids for ids in self._in_flight if ids is not step.plan.request_ids]
        self._note()

    def _note(self) -> None:
        if len(self._in_flight) == 1:
            self._witness(self._in_flight[0])
        else:
            self._witness(list(dict.fromkeys(request_id for ids in self._in_flight for request_id in ids)))
