"""Loaded by every Python process that has this directory on its path: engines preempt every second step.

A third of those that have put out something, by turns, whichever of them the policy would have spared.
"""

import itertools
from typing import Any

from neaptide.engine.clock import VirtualClock
from neaptide.engine.core import EngineCore
from neaptide.engine.messages import StepOutputs
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.timer import StepTimer

_step = EngineCore.step
_steps = itertools.count()


def step(self: EngineCore, *args: Any) -> StepOutputs:
    outputs = _step(self, *args)
    index, scheduler = next(_steps), self.scheduler
    running = [*scheduler.queues.running_online.values(), *scheduler.queues.running_offline.values()]
    running = [request for request in running if request.num_output_tokens]
    victims = running[index // 2 % 3 :: 3]
    if index % 2 and victims and not self.has_step_in_flight:
        draft = Draft(scheduler.index, 0.0, scheduler.queues, StepBudget(scheduler.cost_model, 0))
        for victim in victims:
            draft.preempt(victim)
        scheduler.apply(draft, StepTimer(VirtualClock()))
    return outputs


EngineCore.step = step  # type: ignore[method-assign]
