"""Turns a step's result into tokens, ended requests and outputs."""

import logging

import numpy as np

from neaptide.engine.arrays import ONE, BoolArray, IntArray
from neaptide.engine.messages import RequestOutput
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, FinishReason
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step

logger = logging.getLogger(__name__)


def _chosen(step: Step) -> BoolArray | slice:
    """Selects the parts whose slots have not changed since the step was planned."""
    return slice(None) if step.are_all_current else step.is_current()


class Committer:
    """Writes results into the request table and collects the outputs.

    Work that every slot needs is done for all slots at once. Python code runs only for requests with output: streams,
    and those that end.
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

    @property
    def has_tokens_alone(self) -> bool:
        """Whether there are outputs and none of them is terminal."""
        return bool(self._outputs) and all(output.finish_reason is None for output in self._outputs)

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- steps ----

    def commit(self, step: Step, result: StepResult, following: Step | None, now_s: float) -> None:
        """Adds the step's tokens. Drops the results of requests that have ended or lost their KV since.

        Args:
            following: the step that was planned before this one was done: in flight, or undone.
        """
        if result.errors or not result.is_whole:
            self._take_back(step, result, following)
        plan, table = step.plan, step.plan.table
        if result.errors:
            self._fail_parts(step, result)
        if result.late:
            self._put_off(step, result, now_s)
        current = _chosen(step)
        rows, ends = plan.rows[current], plan.ends[current]
        table.committed[rows] = ends
        if not plan.is_continued:
            self._kv.publish_prompts(rows, ends, self.fail)
            current = _chosen(step)  # A request that raised has ended.
            rows, ends = plan.rows[current], plan.ends[current]
        if result.prompt_logprobs:
            self._keep_prompt_logprobs(step, result)
        sampled, token_ids = plan.sample[current], result.token_ids[current]
        if not plan.is_continued:
            table.first_token_s[rows[sampled & (plan.output_position[current] == 0)]] = now_s
        if plan.is_continued or np.count_nonzero(sampled) == len(rows):
            stops = self._append(rows, ends, token_ids)
        else:
            stops = np.zeros(len(rows), np.bool_)
            stops[sampled] = self._append(rows[sampled], ends[sampled], token_ids[sampled])
        if result.logprobs:
            self._keep_logprobs(rows[sampled], result)
        self._report_rows(rows, ends, token_ids, sampled, stops, now_s)

    def _take_back(self, step: Step, result: StepResult, following: Step | None) -> None:
        """Makes requests that read the missing KV of a failed request of this step compute it again."""
        lost: set[int] = set()
        failed = set(result.errors)
        if not result.is_whole:  # Parts that have changed were not run again.
            failed.update(step.plan.request_ids[index] for index in np.flatnonzero(~step.is_current()).tolist())
            if failed.issuperset(step.plan.request_ids):
                lost = self._kv.invalidate_loads(step.plan.loads)  # It may be that no part copied to them.
        step.take_back(self._kv, failed, lost)
        if following is not None:
            following.take_back(self._kv, (), lost, ending=failed)

    def _fail_parts(self, step: Step, result: StepResult) -> None:
        """Ends the requests that failed. Some may have read another request's corrupt KV; those start again."""
        plan = step.plan
        for index in step.is_current().nonzero()[0].tolist():
            if (error := result.errors.get(plan.request_ids[index])) is not None:
                self._fail_part(plan.table.request(int(plan.rows[index])), error)

    def _fail_part(self, request: Request, error: str) -> None:
        if error != NUMERICAL_ERROR:
            self.end(request, FinishReason.ERROR, error)
            return
        distrusted = request.block_ids
        self._kv.invalidate(request)
        if request.has_hit:  # Its cached KV may be corrupt, and the request that computed it is not known yet.
            logger.warning("request %s starts again without the prefix cache", request.request_id)
            self._scheduler.begin_again(request)
        else:
            self.end(request, FinishReason.ERROR, error)
        # A kernel that masks by multiplying with 0 would pass non-finite values on to the block's next owner.
        self._scheduler.zero(self._kv.unreferenced(distrusted))

    def _put_off(self, step: Step, result: StepResult, now_s: float) -> None:
        """Puts off requests that sampled nothing because their mask was late. They compute their last token again
        later."""
        plan = step.plan
        for index in step.is_current().nonzero()[0].tolist():
            late_s = result.late.get(plan.request_ids[index])
            if late_s is None or plan.request_ids[index] in result.errors:
                continue
            row, num_committed = int(plan.rows[index]), int(plan.ends[index]) - 1
            self._kv.retract(plan.table.request(row), num_committed)
            plan.table.put_off(row, num_committed, now_s, late_s)

    def _append(self, rows: IntArray, ends: IntArray, token_ids: IntArray) -> BoolArray:
        """Adds the new token of each slot unless it stops its request; returns which do."""
        table = self._scheduler.queues.table
        stops = np.zeros(len(rows), np.bool_)
        for token_id in self._eos_token_ids:
            stops |= token_ids == token_id
        if self._eos_token_ids and np.count_nonzero(stops):
            stops &= ~table.ignore_eos[rows]
        if table.num_own_stops:
            for index in table.own_stops[rows].nonzero()[0].tolist():
                own = table.request(int(rows[index])).params.stop_token_ids
                stops[index] |= int(token_ids[index]) in own
        if has_stops := np.count_nonzero(stops):
            stops &= ends - table.prompt[rows] >= table.min_output[rows]
        table.tokens[rows, ends] = token_ids
        known = ends + ONE
        total = np.maximum(table.total[rows], known)
        if has_stops:
            known[stops] -= 1
            total[stops] = known[stops]
        table.known[rows], table.total[rows] = known, total
        return stops

    def _report_rows(
        self, rows: IntArray, ends: IntArray, token_ids: IntArray, sampled: BoolArray, stops: BoolArray, now_s: float
    ) -> None:
        """Reports ended requests and streams, in the step's order."""
        table = self._scheduler.queues.table
        limit = table.limit[rows]
        # A request without output tokens ends with its prompt.
        is_full = table.known[rows] == limit
        if np.count_nonzero(is_full):
            is_full &= sampled | (ends == limit)
        is_end = stops | is_full
        (speaks,) = (is_end | (sampled & table.streams[rows])).nonzero()
        if not len(speaks):
            return
        slots = rows[speaks]
        columns = zip(
            table.requests_of(slots),
            token_ids[speaks].tolist(),
            table.first_token_s[slots].tolist(),
            is_end[speaks].tolist(),
            speaks.tolist(),
            strict=True,
        )
        for request, token_id, first_token_s, ends_here, index in columns:
            try:
                if not ends_here:
                    self._outputs.append(self._output(request, [token_id], first_token_s))
                elif stops[index]:
                    self.end(request, FinishReason.STOP, stop_token_id=token_id)
                else:
                    if not sampled[index]:
                        request.first_token_s = now_s
                    self.end(request, FinishReason.LENGTH)
            except Exception:
                self.fail(request)

    def _keep_logprobs(self, rows: IntArray, result: StepResult) -> None:
        table = self._scheduler.queues.table
        for slot in rows.tolist():
            if (logprobs := result.logprobs.get(table.ids[slot])) is not None:
                table.request(slot).unreported_logprobs.append(logprobs)

    def _keep_prompt_logprobs(self, step: Step, result: StepResult) -> None:
        plan = step.plan
        for index in step.is_current().nonzero()[0].tolist():
            entries = result.prompt_logprobs.get(plan.request_ids[index])
            if entries is not None:
                request = plan.table.request(int(plan.rows[index]))
                # After a preemption, log-probabilities that are known already are computed again.
                known = len(request.prompt_logprobs) - int(plan.num_computed[index])
                request.prompt_logprobs += entries[max(known, 0) :]

    # ---- ends ----

    def end(
        self, request: Request, reason: FinishReason, error: str | None = None, stop_token_id: int | None = None
    ) -> None:
        """Ends an accepted request; the only place that does."""
        assert request.status is not RequestStatus.FINISHED
        if reason is not FinishReason.ERROR:
            self._kv.publish_committed(request)
        self._observers.ended(request, reason)
        output = self._report(request)
        output.finish_reason = reason
        output.error = error
        output.stop_token_id = stop_token_id
        self._scheduler.forget(request)
        self._outputs.append(output)

    def fail(self, request: Request) -> None:
        """Ends a request that raised; to be called in the except clause. Raises the exception again if the request has
        already ended."""
        logger.exception("request %s ends with an internal error", request.request_id)
        if request.status is RequestStatus.FINISHED:
            raise
        self.end(request, FinishReason.ERROR, INTERNAL_ERROR)

    def refuse(self, request_id: str, error: str) -> None:
        """Ends a request that was never accepted."""
        self._observers.refused(request_id)
        self._outputs.append(RequestOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error))

    def _report(self, request: Request) -> RequestOutput:
        new_token_ids = request.output_token_ids(request.num_reported_tokens)
        return self._output(request, new_token_ids, request.first_token_s)

    def _output(self, request: Request, new_token_ids: list[int], first_token_s: float) -> RequestOutput:
        request.num_reported_tokens += len(new_token_ids)
        output = RequestOutput(
            request.request_id,
            new_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            scheduled_s=request.scheduled_s,
            first_token_s=first_token_s,
        )
        if request.wants_logprobs:
            _attach_logprobs(request, output)
        return output


def _attach_logprobs(request: Request, output: RequestOutput) -> None:
    if request.params.logprobs is not None:
        output.logprobs = request.unreported_logprobs
        request.unreported_logprobs = []
    if request.params.prompt_logprobs is not None and not request.prompt_logprobs_reported:
        output.prompt_logprobs = request.prompt_logprobs
        request.prompt_logprobs_reported = True
