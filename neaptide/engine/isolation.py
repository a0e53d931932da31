"""One request's failure stays its own: a step that raises is taken apart until the culprit stands alone."""

import logging
from collections.abc import Sequence

from neaptide.engine.batch import BatchShape, ScheduledRequest, StepPlan, StepResult
from neaptide.engine.interfaces import Executor
from neaptide.engine.params import INTERNAL_ERROR

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""After so many steps in a row in which nothing succeeded the executor is at fault, not the requests."""


class IsolatingExecutor:
    """Runs steps on an executor; halves a step that raises and runs the halves, down to single requests."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._failed_steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        """The step's result, with an ``INTERNAL_ERROR`` for every request that cannot be computed.

        Raises:
            Exception: what the executor raised, if it raises for each of several requests, or for every request of
                ``MAX_FAILED_STEPS`` steps: no request is to blame for that.
        """
        try:
            result = self._executor.submit(plan).wait()
        except Exception as error:
            logger.exception("step %d failed with %d requests", plan.step, len(plan.scheduled))
            result = self._take_apart(plan, plan.scheduled)
            self._blame(plan, result, error)
        else:
            self._failed_steps = 0
        return result

    def _blame(self, plan: StepPlan, result: StepResult, error: Exception) -> None:
        failed = [part.request_id for part in plan.scheduled if result.errors.get(part.request_id) == INTERNAL_ERROR]
        self._failed_steps = self._failed_steps + 1 if len(failed) == len(plan.scheduled) else 0
        if len(failed) == len(plan.scheduled) != 1 or self._failed_steps == MAX_FAILED_STEPS:
            raise error
        logger.error("%d requests of step %d are given up: %s", len(failed), plan.step, ", ".join(failed))

    def _take_apart(self, plan: StepPlan, failed: Sequence[ScheduledRequest]) -> StepResult:
        if len(failed) <= 1:
            return StepResult(errors={part.request_id: INTERNAL_ERROR for part in failed}, is_whole=False)
        result = StepResult(is_whole=False)
        middle = len(failed) // 2
        for half in (failed[:middle], failed[middle:]):
            try:
                part = self._executor.submit(_part_of(plan, half)).wait()
            except Exception:
                part = self._take_apart(plan, half)
            result.merge(part)
        return result


def _part_of(plan: StepPlan, scheduled: Sequence[ScheduledRequest]) -> StepPlan:
    """The plan for some of its requests. What the executor heard before it raised, it may hear again."""
    ids = {part.request_id for part in scheduled}
    shape = BatchShape()
    for part in scheduled:
        shape.add(len(part.token_ids), part.num_computed_tokens)
    new = [request for request in plan.new_requests if request.request_id in ids]
    return StepPlan(plan.step, list(scheduled), shape, new_requests=new, finished_ids=plan.finished_ids)
