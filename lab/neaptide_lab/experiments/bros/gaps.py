"""Finds where a policy leaves offline work undone, from its steps, for the notes on a throughput that falls short."""

from dataclasses import dataclass

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.simulation.measures import Window


@dataclass(slots=True)
class OfflineGaps(EngineObserver):
    """Shares of the predicted time of the steps that are planned in the window."""

    window_s: Window
    _steps_s: float = 0.0
    _sat_out_s: float = 0.0
    _waited_s: float = 0.0
    _unused_s: float = 0.0
    _headroom_s: float = 0.0
    _dry_s: float = 0.0

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        if not self.window_s[0] <= draft.now_s <= self.window_s[1]:
            return
        queues, seconds = scheduler.queues, step.plan.predicted_s
        self._steps_s += seconds
        residents = queues.running_offline
        if not residents and not len(queues.pool):
            self._dry_s += seconds
        elif residents and residents.keys().isdisjoint(step.plan.request_ids):
            self._sat_out_s += seconds
        if len(queues.pool):
            blocks = scheduler.kv.occupancy()
            num_blocks = blocks.online + blocks.offline + blocks.cached + blocks.free
            self._waited_s += seconds
            self._unused_s += seconds * (blocks.cached + blocks.free) / num_blocks
            self._headroom_s += seconds * scheduler.headroom.headroom_blocks(draft.now_s) / num_blocks

    def __str__(self) -> str:
        waited_s = self._waited_s or 1.0
        return (
            f"{self._percent(self._sat_out_s)} of the time went to steps in which every resident offline request sat "
            f"out, {self._percent(self._dry_s)} had none to run; rows waited for {self._percent(self._waited_s)} of "
            f"it, while {self._unused_s / waited_s:.0%} of the blocks held nothing that runs and "
            f"{self._headroom_s / waited_s:.0%} were forecast for online work"
        )

    def _percent(self, seconds: float) -> str:
        return f"{seconds / (self._steps_s or 1.0):.0%}"
