"""How long planning takes the processor, whatever else runs on the machine."""

import time
from dataclasses import dataclass

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step


@dataclass(slots=True)
class PlanningTime(EngineObserver):
    """Processor time of this thread, of every planning that made a step."""

    seconds: float = 0.0
    num_steps: int = 0
    _began_s: float = 0.0

    def planning(self, now_s: float) -> None:
        self._began_s = time.thread_time()

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self.seconds += time.thread_time() - self._began_s
        self.num_steps += 1

    @property
    def mean_s(self) -> float:
        return self.seconds / self.num_steps if self.num_steps else 0.0
