"""From a step's result to tokens, ends and outputs."""

import logging

import numpy as np

from neaptide.engine.batch import StepResult
from neaptide.engine.kv.block_table import IntArray
from neaptide.engine.messages import RequestOutput
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, FinishReason
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.step import Step
from neaptide.engine.table import BoolArray

logger = logging.getLogger(__name__)


class Committer:
    """Writes results into the request table, and collects the outputs that they make.

    What every row needs is done for all rows at once; only requests with something to say cost Python: those that
    end, and streams.
    """

    def __init__(self, scheduler: Scheduler, eos_token_ids: frozenset[int], observers: EngineObserver) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._eos_token_ids = sorted(eos_token_ids)
        self._observers = observers
        self._outputs: list[RequestOutput] = []

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- steps ----

    def commit(self, step: Step, result: StepResult, following: Step | None, now_s: float) -> None:
        """Takes in what the step brought. Rows of requests that have ended or lost their KV meanwhile are dropped.

        Args:
            following: the step that was planned before this one was done: in flight, or undone if this one raised.
        """
        if result.errors:
            self._fail_parts(step, result, following)
        plan, table = step.plan, step.plan.table
        current = step.is_current()
        self._publish(plan.rows[current], step.ends[current])
        current &= step.is_current()  # a request that raised has ended
        rows, ends = plan.rows[current], step.ends[current]
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(step, result, current)
        sampled = plan.sample[current]
        first = rows[sampled & (plan.output_position[current] == 0)]
        table.first_token_s[first] = now_s
        stops = np.zeros(len(rows), np.bool_)
        stops[sampled] = self._append(rows[sampled], ends[sampled], result.token_ids[current][sampled])
        self._report_rows(rows, ends, sampled, stops, result, now_s)

    def _fail_parts(self, step: Step, result: StepResult, following: Step | None) -> None:
        """Requests that failed end; those that read what a failed one should have written compute it again."""
        lost: set[int] = set()
        step.take_back(self._kv, result.errors, lost)
        for index in np.flatnonzero(step.is_current()).tolist():
            if (error := result.errors.get(step.plan.request_ids[index])) is not None:
                request = step.plan.table.request(int(step.plan.rows[index]))
                if error == NUMERICAL_ERROR:
                    self._kv.distrust(request)
                self.end(request, FinishReason.ERROR, error)
        if following is not None:
            following.take_back(self._kv, (), lost)

    def _publish(self, rows: IntArray, ends: IntArray) -> None:
        for request, num_tokens in self._kv.publishable(rows, ends):
            try:
                self._kv.publish(request, num_tokens)
            except Exception:
                self.fail(request)

    def _append(self, rows: IntArray, ends: IntArray, token_ids: IntArray) -> BoolArray:
        """Notes the new token of each row, unless it stops its request; returns which do."""
        table = self._scheduler.queues.table
        stops = np.zeros(len(rows), np.bool_)
        for token_id in self._eos_token_ids:
            stops |= token_ids == token_id
        stops &= ~table.ignore_eos[rows]
        for index in np.flatnonzero(table.own_stops[rows]).tolist():
            own = table.request(int(rows[index])).params.stop_token_ids
            stops[index] |= int(token_ids[index]) in own
        stops &= ends - table.prompt[rows] >= table.min_output[rows]
        goes_on = ~stops
        table.tokens[rows, ends] = token_ids
        table.known[rows[goes_on]] = ends[goes_on] + 1
        table.total[rows] = np.where(stops, table.known[rows], np.maximum(table.total[rows], table.known[rows]))
        return stops

    def _report_rows(
        self, rows: IntArray, ends: IntArray, sampled: BoolArray, stops: BoolArray, result: StepResult, now_s: float
    ) -> None:
        """Ends and streams, in the step's order."""
        table = self._scheduler.queues.table
        known, limit = table.known[rows], table.limit[rows]
        # A request that wants no output ends with its prompt.
        is_full = np.where(limit == table.prompt[rows], ends == limit, sampled & (known == limit))
        speaks = stops | is_full | (sampled & table.streams[rows])
        if result.logprobs:
            self._keep_logprobs(rows[sampled], result)
        for index in np.flatnonzero(speaks).tolist():
            request = table.request(int(rows[index]))
            try:
                if stops[index]:
                    self.end(request, FinishReason.STOP, stop_token_id=int(table.tokens[rows[index], ends[index]]))
                elif is_full[index]:
                    if not sampled[index]:
                        request.first_token_s = now_s
                    self.end(request, FinishReason.LENGTH)
                else:
                    self._outputs.append(self._report(request))
            except Exception:
                self.fail(request)

    def _keep_logprobs(self, rows: IntArray, result: StepResult) -> None:
        table = self._scheduler.queues.table
        for seat in rows.tolist():
            if (logprobs := result.logprobs.get(table.ids[seat])) is not None:
                table.request(seat).unreported_logprobs.append(logprobs)

    def _keep_prompt_logprobs(self, step: Step, result: StepResult, current: BoolArray) -> None:
        plan = step.plan
        for index in np.flatnonzero(current).tolist():
            entries = result.prompt_logprobs.get(plan.request_ids[index])
            if entries is not None:
                request = plan.table.request(int(plan.rows[index]))
                # Those known already are recomputed ones, after a preemption.
                known = len(request.prompt_logprobs) - int(plan.num_computed[index])
                request.prompt_logprobs += entries[max(known, 0) :]

    # ---- ends ----

    def end(
        self, request: Request, reason: FinishReason, error: str | None = None, stop_token_id: int | None = None
    ) -> None:
        """The one place where an accepted request ends."""
        assert request.status is not RequestStatus.FINISHED
        self._observers.ended(request, reason)
        output = self._report(request)
        output.finish_reason = reason
        output.error = error
        output.stop_token_id = stop_token_id
        self._scheduler.forget(request)
        self._outputs.append(output)

    def fail(self, request: Request) -> None:
        """Ends a request that raised, from the except clause that caught it. Raises it again if that is too late."""
        logger.exception("request %s is given up", request.request_id)
        if request.status is RequestStatus.FINISHED:
            raise
        self.end(request, FinishReason.ERROR, INTERNAL_ERROR)

    def refuse(self, request_id: str, error: str) -> None:
        """Ends something that never became a request with state."""
        self._observers.refused(request_id)
        self._outputs.append(RequestOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error))

    def _report(self, request: Request) -> RequestOutput:
        new_token_ids = request.output_token_ids(request.num_reported_tokens)
        request.num_reported_tokens += len(new_token_ids)
        output = RequestOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            scheduled_s=request.scheduled_s,
            first_token_s=request.first_token_s,
        )
        if request.params.logprobs is not None:
            output.logprobs = request.unreported_logprobs
            request.unreported_logprobs = []
        if request.params.prompt_logprobs is not None and not request.prompt_logprobs_reported:
            output.prompt_logprobs = request.prompt_logprobs
            request.prompt_logprobs_reported = True
        return output
