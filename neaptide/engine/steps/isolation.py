"""Failure isolation: if a step fails, its requests are retried in smaller groups until the faulty one is found."""

import logging

from neaptide.engine.arrays import IntArray
from neaptide.engine.interfaces import Executor, StepHandle
from neaptide.engine.params import INTERNAL_ERROR, SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan, StepResult

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 8
"""Number of consecutive steps without a successful request after which the executor is at fault, not the requests."""
PROBE = NewRequest("neaptide-probe", [0], SamplingParams(max_tokens=1, temperature=0.0))
"""A request that every executor can run. If it fails as well, the executor is at fault."""


class StepError(Exception):
    """A step failed; the cause is the executor's exception."""


class ProbeError(Exception):
    """The executor failed for ``PROBE`` too; the cause is its exception."""


class RaisedHandle:
    """Handle of a step whose submission failed. It raises in ``wait``, so that errors keep the order of the steps."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


class IsolatingExecutor:
    """Runs steps on an executor. Retries the requests of a failed step in halves, down to single requests.

    A request that fails alone is at fault if ``PROBE``, run right after it, succeeds.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._failed_steps = 0

    def submit(self, plan: StepPlan) -> StepHandle:
        """Starts a step. Never raises: the handle raises instead."""
        try:
            return self._executor.submit(plan)
        except Exception as error:
            return RaisedHandle(error)

    def wait(self, plan: StepPlan, handle: StepHandle) -> StepResult:
        """Waits for the step's result.

        Raises:
            StepError: the step failed. With no step in flight, ``take_apart`` finds the cause.
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
        """Retries a step that failed with ``error``; each request that fails alone gets an ``INTERNAL_ERROR``.

        Args:
            current: parts to retry; the others have changed since the step was planned.

        Raises:
            BaseException: ``error``, if the probe fails too, or no request of ``MAX_FAILED_STEPS`` steps succeeded.
                Then the executor is at fault.
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
                self._run(plan, current, result)  # Without the other parts these may succeed.
        except ProbeError as probe_error:
            raise error from probe_error
        failed = [request_id for request_id, why in result.errors.items() if why == INTERNAL_ERROR]
        self._failed_steps = self._failed_steps + 1 if len(failed) == len(current) else 0
        if self._failed_steps == MAX_FAILED_STEPS:
            raise error
        if failed:
            names = ", ".join(failed)
            logger.error("%d requests of step %d failed alone: %s", len(failed), plan.step, names)
        return result

    def _halve(self, plan: StepPlan, failed: IntArray, result: StepResult) -> None:
        """Runs the parts that failed together in two halves. The executor may receive requests that it knows
        already."""
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
        """Runs ``PROBE`` in a block of the request that failed at ``index``: this step had to write to it.

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
