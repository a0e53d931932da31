"""Steps that are left between layers and gone on with: an engine core that only a simulation has, to see what that
would be worth (steps that are given up are the engine's own: ``Scheduler.give_up``).

While a step of offline work alone runs, an online request may come. The step then ends behind the layer that runs. What
is left of it goes on beside the request's steps in pieces of whole layers, as long as the streams can spare, or at one
go when no online work is left; a piece is left in turn. Until the step is done no other offline work is planned.

Left out, all to the good of the idea: how the flag reaches the layers, prefixes that a step has published and not
computed, and memory for what is put aside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore, Publish
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.messages import StepOutputs, StepStats
from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.packing import NeaptideScheduler
from neaptide.engine.scheduler.queues import Queues
from neaptide.engine.scheduler.slack import SlackTracker, StepBounds
from neaptide.engine.steps.step import Step
from neaptide.executors.simulated.trace_executor import EPSILON, Layers, TraceExecutor


@dataclass(slots=True, frozen=True)
class Stops:
    """Between which layers, and at what price."""

    num_layers: int
    handover_s: float
    """To leave a step, and again to go on with it; to give it up costs once as much."""
    idle_factor: float = 1.0
    """On what the next arrival leaves to a step without online work: it need not wait for the end any more."""
    goes_on: bool = True
    """With what is left; else the step is given up."""

    @property
    def given_up(self) -> Layers | None:
        """For an executor that gives steps up."""
        return None if self.goes_on else Layers(self.num_layers, self.handover_s)


@dataclass(slots=True)
class _Left:
    """A step of which some layers have been computed."""

    step: Step
    layer_s: float
    num_layers: int
    """Still to be computed."""
    busy_s: float = 0.0
    """Spent on it, handovers included."""


class StoppingCore(EngineCore):
    """
    Args:
        config: of our policy, with ``overlap_depth`` 0.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: TraceExecutor,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
        clock: Clock,
        eos_token_ids: frozenset[int],
        observers: Sequence[EngineObserver],
        stops: Stops,
    ) -> None:
        super().__init__(config, executor, cost_model, headroom, clock, eos_token_ids, observers)
        assert isinstance(self.scheduler, NeaptideScheduler)
        self._policy = self.scheduler
        self._policy.slack = _LooseSlack(config.scheduler, cost_model, self._policy.queues, stops.idle_factor)
        self._stops, self._device = stops, executor
        self._left: _Left | None = None
        self._is_followed = False
        """The step that was left is done: the next one is for online work alone, as the last piece was beside it."""
        self.num_left = 0
        """Steps that have been left."""

    @property
    def has_work(self) -> bool:
        return self._left is not None or super().has_work

    @property
    def has_step_in_flight(self) -> bool:
        return self._left is not None or super().has_step_in_flight

    def step(self, publish: Publish | None = None) -> StepOutputs:
        """What there is to report is returned, whoever would have it sooner: a simulator has nobody."""
        self._policy.offline_paused = self._left is not None or self._is_followed
        self._is_followed = False
        try:
            stats = self._begin() if self._left is None else self._go_on(self._left)
        finally:
            self._policy.offline_paused = False
        return StepOutputs(self._committer.take_outputs(), stats)

    def _begin(self) -> list[StepStats]:
        step = self._start_step()
        if step is None:
            return []
        now_s = self._clock.now()
        seconds = self._device.free_s - now_s
        if step.is_online.any() or not now_s < self._device.next_arrival_s < now_s + seconds:
            return [self._finish(step)]
        self._device.leave()
        num_layers = self._stops.num_layers
        self._left = _Left(step, seconds / num_layers, num_layers)
        self._compute(self._left, num_layers)
        if self._left.num_layers:
            self.num_left += 1
            self._hand_over(self._left)
            return []
        return self._end(self._left)

    def _go_on(self, left: _Left) -> list[StepStats]:
        draft = self.scheduler.draft(self._clock.now())
        if (num_layers := self._spared_layers(draft, left)) > 0:
            self._hand_over(left)
            self._compute(left, num_layers)
            if not left.num_layers:
                self._is_followed = draft.num_parts > 0
                return self._end(left)
            self._hand_over(left)
        if not draft.num_parts:
            return []
        step = self._start_step()
        return [] if step is None else [self._finish(step)]

    def _spared_layers(self, draft: Draft, left: _Left) -> int:
        """How many layers may be computed before this step of online work alone. An arrival ends them, so no time is
        kept for it."""
        if not draft.num_parts:
            return left.num_layers
        if draft.budget.shape.prefill_requests:
            return 0
        limit_s = min(draft.bounds_s[name] for name in ("gap", "streams", "prompts")) * self._policy.controller.factor
        spare_s = limit_s - sum(draft.budget.predict_with(0)) - 2 * self._stops.handover_s
        return min(int(spare_s / left.layer_s), left.num_layers) if spare_s > 0 else 0

    def _compute(self, left: _Left, num_layers: int) -> None:
        """So many layers, or as many as have begun when a request comes."""
        now_s = self._clock.now()
        if now_s < self._device.next_arrival_s < math.inf:
            begun = math.ceil((self._device.next_arrival_s - now_s) / left.layer_s - EPSILON)
            num_layers = min(num_layers, max(begun, 1))
        left.num_layers -= num_layers
        self._spend(left, num_layers * left.layer_s)

    def _hand_over(self, left: _Left) -> None:
        self._spend(left, self._stops.handover_s)

    def _spend(self, left: _Left, seconds: float) -> None:
        self._clock.sleep_until(self._clock.now() + seconds)
        left.busy_s += seconds

    def _end(self, left: _Left) -> list[StepStats]:
        """Commits it as a step that took what was spent on it."""
        self._left = None
        self._executed_at_s = self._clock.now() - left.busy_s
        return [self._finish(left.step)]


class _LooseSlack(SlackTracker):
    def __init__(self, config: SchedulerConfig, cost_model: CostModel, queues: Queues, idle_factor: float) -> None:
        super().__init__(config, cost_model)
        self._queues, self._idle_factor = queues, idle_factor

    def bounds(self, draft: Draft) -> StepBounds:
        found = super().bounds(draft)
        if self._queues.running_online or self._queues.waiting_online:
            return found
        return found._replace(idle_s=self._idle_factor * found.idle_s)
