"""Counts of what offline requests lose to the other tenants of their blocks, over a run."""

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide_lab.two_tenants.blocks import TenantCopies


class TenantCounts(EngineObserver):
    """Counts over the committed steps of an engine; all are 0 under another cache."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        """Slots saved, moved and restored by each step that copies some."""
        self.num_checkpointed = 0
        """Requests that lost their first slots to another tenant."""
        self.num_swapped = 0
        """Requests whose blocks were swapped out completely."""

    @property
    def num_slots_saved(self) -> int:
        """Slots copied to host memory."""
        return sum(num_saved for num_saved, _, _ in self.steps)

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        copies = step.plan.slot_copies
        if isinstance(copies, TenantCopies):
            self.steps.append((copies.num_saved, copies.num_moved, copies.num_restored))
            self.num_checkpointed += copies.num_checkpointed
            self.num_swapped += copies.num_swapped
