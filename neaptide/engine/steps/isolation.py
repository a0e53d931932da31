"""One request's failure stays its own: a step that raises is taken apart until the culprit stands alone."""

import logging

from neaptide.engine.arrays import IntArray
from neaptide.engine.interfaces import Executor, StepHandle
from neaptide.engine.params import INTERNAL_ERROR, SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan, StepResult

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""After so many steps in a row in which no request succeeded the executor is at fault, not the requests."""
PROBE = NewRequest("neaptide-probe", [0], SamplingParams(max_tokens=1, temperature=0.0))
"""A request that every executor can run: if it raises as well, no other is to blame."""


class StepError(Exception):
    """A step raised; its cause is what the executor raised."""


class ProbeError(Exception):
    """The executor raised for ``PROBE``, too; the cause is what it raised."""


class RaisedHandle:
    """Of a step whose submission raised: tells when it is waited for, in the order of the steps."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


class IsolatingExecutor:
    """Runs steps on an executor; halves a step that raises and runs the halves, down to single requests.

    A request that raises alone fails if ``PROBE``, run right after it, does not raise.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._failed_steps = 0

    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts a step. Never raises: the handle does."""
        try:
            return self._executor.submit(plan)
        except Exception as error:
            return RaisedHandle(error)

    def wait(self, plan: StepPlan, handle: StepHandle) -> StepResult:
        """
        Raises:
            StepError: the step raised; with no step in flight ``take_apart`` finds out why.
        """
        try:
            result = handle.wait()
        except Exception as error:
            logger.exception("step %d failed with %d requests", plan.step, len(plan))
            raise StepError from error
        self._failed_steps = 0
        return result

    def close(self) -> None:
        self._executor.close()

    def take_apart(self, plan: StepPlan, current: IntArray, error: BaseException | None) -> StepResult:
        """The result of a step that raised ``error``, with an ``INTERNAL_ERROR`` for every request that cannot be
        computed.

        Args:
            current: those of its parts that still are what they were; the others are left alone.

        Raises:
            BaseException: ``error``, if the probe raises, too, or no request of ``MAX_FAILED_STEPS`` steps succeeded:
                no request is to blame for that.
        """
        assert error is not None
        result = StepResult.of(plan)
        result.is_whole = False
        if not len(current):
            return result
        try:
            if len(current) == len(plan):
                self._halve(plan, current, result)
            else:
                self._run(plan, current, result)  # without the others they may well succeed
        except ProbeError as probe_error:
            raise error from probe_error
        failed = [request_id for request_id, why in result.errors.items() if why == INTERNAL_ERROR]
        self._failed_steps = self._failed_steps + 1 if len(failed) == len(current) else 0
        if self._failed_steps == MAX_FAILED_STEPS:
            raise error
        if failed:
            logger.error("%d requests of step %d are given up: %s", len(failed), plan.step, ", ".join(failed))
        return result

    def _halve(self, plan: StepPlan, failed: IntArray, result: StepResult) -> None:
        """Runs the parts that failed together in two halves. What the executor heard before it raised, it may hear
        again."""
        if len(failed) == 1:
            index = int(failed[0])
            self._probe(plan, index)
            result.errors[plan.request_ids[index]] = INTERNAL_ERROR
            return
        middle = len(failed) // 2
        for half in (failed[:middle], failed[middle:]):
            self._run(plan, half, result)

    def _run(self, plan: StepPlan, indices: IntArray, result: StepResult) -> None:
        try:
            part = plan.part(indices)
            result.merge(self._executor.submit(part).wait(), indices)
        except Exception:
            self._halve(plan, indices, result)

    def _probe(self, plan: StepPlan, index: int) -> None:
        """Runs ``PROBE`` in a block of the request that failed at ``index``: it had to be written in this step.

        Raises:
            ProbeError: the executor is at fault.
        """
        blocks = plan.table.blocks
        position = int(plan.num_computed[index])
        block = blocks.blocks(int(plan.rows[index]))[position // blocks.block_size]
        part = ScheduledRequest(PROBE.request_id, PROBE.prompt_token_ids, 0, [block], sample=True, output_position=0)
        try:
            self._executor.submit(StepPlan.of_parts(plan.step, [part], [PROBE])).wait()
            self._executor.submit(StepPlan.of_parts(plan.step, [], finished_ids=[PROBE.request_id])).wait()
        except Exception as error:
            raise ProbeError from error
