"""What every scheduling policy shares: the queues, the frame of a step, the plan it ends in."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from neaptide.engine.batch import NewRequest, ScheduledRequest, StepPlan
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.offline.pool import RowKey
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.preemption import PreemptionCount, Preemptor
from neaptide.engine.scheduler.queues import OnlineOrder, Queues, deadline_order
from neaptide.engine.scheduler.step import StepBuilder


class PlanningError(Exception):
    """Planning failed at one request; the others' state is as if the step had not been planned."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"planning failed at {request.request_id}")
        self.request = request


class Scheduler(ABC):
    """Plans steps. Owns the queues; knows nothing of tensors, sockets or wall clocks.

    A policy says in ``_pack`` who takes part in a step.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(deadline_order)
    """Order of the waiting online requests."""
    row_key: ClassVar[RowKey | None] = None
    """Order of a job's rows in the offline pool; None is file order."""
    uses_prefix_cache: ClassVar[bool] = True
    publishes_when_planned: ClassVar[bool] = False
    """Whether requests that are planned for later in a step find the blocks that earlier ones will fill in it; else
    they find what the steps before have computed."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        self.config = config
        self.max_step_tokens = config.max_num_batched_tokens
        """Tokens computed in one step at most; a policy that cannot cut prompts must allow whole ones."""
        self.queues = Queues(kv, type(self).online_order, type(self).row_key)
        self.offline_paused = False
        self.cost_model = cost_model
        self.headroom = headroom
        self.preemptor = Preemptor(self.queues)
        self._step = 0
        self._finished_ids: list[str] = []
        self.last: StepBuilder | None = None
        """The step planned last, for the counters."""

    @abstractmethod
    def _pack(self, step: StepBuilder) -> float:
        """Fills the step; returns its time budget in seconds (``math.inf`` for none).

        ``step.at`` is the request being looked at, None between them: whom to blame if this raises.
        """

    def observe_arrival(self, request: Request) -> None:
        """An online request was accepted."""
        self.headroom.observe_arrival(request.arrival_s)

    def observe_held(self, now_s: float) -> None:
        """Blocks have been taken or given back."""
        self.headroom.observe(now_s, self.queues.kv.pool.num_online)

    def observe_step(self, plan: StepPlan, seconds: float) -> None:  # noqa: B027 (a policy need not learn)
        """A planned step took ``seconds``."""

    @property
    def has_work(self) -> bool:
        """Whether a step could do something (offline work does not count while it is paused)."""
        queues = self.queues
        if queues.waiting_online or queues.running_online:
            return True
        return not self.offline_paused and bool(queues.running_offline or len(queues.pool))

    def take_preemptions(self) -> PreemptionCount:
        count, self.preemptor.count = self.preemptor.count, PreemptionCount()
        return count

    def forget(self, request: Request) -> None:
        """A request ended: the executor hears of it with the next plan."""
        self.queues.finish(request)
        if request.known_to_executor:
            self._finished_ids.append(request.request_id)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nobody can run. Progress advances here, not at commit.

        Raises:
            PlanningError: a request could not be planned for.
        """
        self._step += 1
        self.observe_held(now_s)
        budget = StepBudget(self.cost_model, self.max_step_tokens)
        publishes = type(self).publishes_when_planned
        step = StepBuilder(self._step, now_s, self.queues, self.preemptor, budget, publishes)
        try:
            limit_s = self._pack(step)
            step.at = None
            self.last = step
            return self._plan(step, limit_s) if step.scheduled else None
        except Exception as error:
            step.take_back()
            if step.at is None:
                raise
            raise PlanningError(step.at) from error

    def _plan(self, step: StepBuilder, limit_s: float) -> StepPlan:
        seconds, margin_s = self.cost_model.predict(step.budget.shape)
        plan = StepPlan(step.index, [], step.budget.shape, predicted_s=seconds, margin_s=margin_s)
        plan.budget_s = limit_s if math.isfinite(limit_s) else 0.0
        for request, num_tokens in step.scheduled:
            step.at = request
            if not request.known_to_executor:
                plan.new_requests.append(NewRequest(request.request_id, request.prompt_token_ids, request.params))
            start, token_ids = request.num_computed_tokens, request.token_ids
            end = start + num_tokens
            plan.scheduled.append(
                ScheduledRequest(
                    request_id=request.request_id,
                    token_ids=token_ids[start:end],
                    num_computed_tokens=start,
                    block_ids=request.block_ids,
                    sample=end == len(token_ids) and request.params.max_tokens > 0,
                    output_position=len(token_ids) - request.num_prompt_tokens,
                )
            )
        # Only now, when nothing can fail any more: progress that was noted must be computed.
        plan.finished_ids, self._finished_ids = self._finished_ids, []
        for request, num_tokens in step.scheduled:
            request.known_to_executor = True
            request.num_computed_tokens += num_tokens
        return plan
