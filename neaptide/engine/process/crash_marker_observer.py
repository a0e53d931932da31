"""Updates the crash marker with the steps in flight."""

from neaptide.engine.observer import EngineObserver
from neaptide.engine.process.crash_marker import CrashMarker
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepPlan, StepResult
from neaptide.engine.steps.step import Step


class CrashMarkerObserver(EngineObserver):
    """Notes every submitted step until it is done: its requests, and its predicted time."""

    def __init__(self, witness: CrashMarker) -> None:
        self._marker = witness
        self._in_flight: list[StepPlan] = []

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self._in_flight.append(step.plan)
        self._note()

    def executed(self, step: Step, result: StepResult) -> None:
        self._is_over(step)

    def undone(self, step: Step) -> None:
        self._is_over(step)

    def _is_over(self, step: Step) -> None:
        self._in_flight = [plan for plan in self._in_flight if plan is not step.plan]
        self._note()

    def _note(self) -> None:
        if len(self._in_flight) == 1:
            (plan,) = self._in_flight
            self._marker(plan.request_ids, plan.predicted_s + plan.margin_s)
        else:
            ids = dict.fromkeys(request_id for plan in self._in_flight for request_id in plan.request_ids)
            self._marker(list(ids), sum(plan.predicted_s + plan.margin_s for plan in self._in_flight))
