"""EngineCore: the loop. Messages in, one step, outputs out."""

import logging
from collections.abc import Callable, Sequence

from neaptide.engine.batch import ScheduledRequest, StepPlan, StepResult
from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.engine.interfaces import CostModel, Executor, HeadroomPredictor
from neaptide.engine.isolation import IsolatingExecutor
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    CancelBatch,
    RequestOutput,
    SetOffline,
    StepOutputs,
    ToEngine,
)
from neaptide.engine.offline.pool import row_request_id
from neaptide.engine.params import INTERNAL_ERROR, NUMERICAL_ERROR, FinishReason
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.base import PlanningError
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.engine.stats import StepTimer, step_stats

logger = logging.getLogger(__name__)

RequestLog = Callable[[str, str], None]
"""Called with (event, request_id); events are ``start`` (first step of a request) and ``end``."""
Witness = Callable[[Sequence[str]], None]
"""Called with the requests of a step before it runs, and with none after it."""


class EngineCore:
    """Owns every request from acceptance to its one terminal output. Single-threaded.

    Args:
        eos_token_ids: the model's end-of-sequence tokens.
        request_log: what was executed, and how often.
        witness: what is being executed.
        recorder: writes the step log.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
        clock: Clock,
        eos_token_ids: frozenset[int] = frozenset(),
        request_log: RequestLog | None = None,
        witness: Witness | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        policy = POLICIES[config.scheduler.policy]
        prefix_cache = config.cache.enable_prefix_cache and policy.uses_prefix_cache
        self.kv = KVCacheManager(executor.num_blocks, config.cache.block_size, prefix_cache)
        self.scheduler = policy(config.scheduler, self.kv, cost_model, headroom)
        self._max_num_tokens = min(config.scheduler.max_model_len, executor.num_blocks * config.cache.block_size)
        """Prompt and output tokens of one request at most."""
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._executor = IsolatingExecutor(executor)
        self._cost_model = cost_model
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._log = request_log or (lambda event, request_id: None)
        self._witness = witness or (lambda request_ids: None)
        self.recorder = recorder
        """To be closed when the engine ends."""
        if recorder is not None:
            self.scheduler.queues.pool.on_row = recorder.row
        self._outputs: list[RequestOutput] = []
        """Terminal outputs that no step made: refusals, aborts."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._outputs)

    # ---- messages ----

    def handle(self, message: ToEngine) -> None:
        now_s = self._clock.now()
        if self.recorder is not None:
            self.recorder.message(message, now_s)
        if isinstance(message, AddRequest):
            try:
                self._add_request(message)
            except Exception:
                logger.exception("request %s could not be taken in", message.request_id)
                self._emit_terminal(message.request_id, FinishReason.ERROR, INTERNAL_ERROR)
        elif isinstance(message, AbortRequest):
            for request_id in message.request_ids:
                self._abort(request_id, message.reason)
            self.scheduler.observe_held(now_s)  # perhaps nothing is left to run, and no step will tell
        elif isinstance(message, AddBatch):
            self._add_batch(message, now_s)
        elif isinstance(message, CancelBatch):
            self._cancel_batch(message.batch_id)
        elif isinstance(message, SetOffline):
            self.scheduler.offline_paused = message.paused

    def _add_request(self, message: AddRequest) -> None:
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            params=message.params,
            tier=message.tier,
            arrival_s=message.arrival_s,
            ttft_slo_s=message.ttft_slo_s,
            tpot_slo_s=message.tpot_slo_s,
            salt=message.salt,
        )
        if (error := self._refusal(request)) is not None:
            self._refuse(request, error)
        elif request.is_online:
            self.scheduler.observe_arrival(request)
            self.scheduler.queues.add_online(request)
        else:
            self.scheduler.queues.pool.add_flex(request)

    def _add_batch(self, message: AddBatch, now_s: float) -> None:
        """Rows that cannot run end at once; none of the others waits for that."""
        refused, error = message.rows, "the prompt is empty or the request does not fit into the KV cache"
        try:
            refused = self.scheduler.queues.pool.add_batch(message, now_s, self._max_num_tokens)
        except (OSError, ValueError) as exception:
            error = str(exception)
        for row in refused:
            self._emit_terminal(row_request_id(message.batch_id, row), FinishReason.ERROR, error)

    def _refusal(self, request: Request) -> str | None:
        """Why the request can never run; the edge checks first, so this guards against a bug there."""
        if not request.prompt_token_ids:
            return "the prompt is empty"
        if request.num_prompt_tokens + request.params.max_tokens > self._max_num_tokens:
            return "prompt and output exceed the context length or the KV cache"
        return None

    def _refuse(self, request: Request, error: str) -> None:
        self._emit_terminal(request.request_id, FinishReason.ERROR, error)

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        queues = self.scheduler.queues
        request = queues.find(request_id)
        if request is None and (request := queues.pool.remove(request_id)) is None:
            return  # it has ended already
        self._end(request, reason)

    def _cancel_batch(self, batch_id: str) -> None:
        queues = self.scheduler.queues
        running = [r for r in queues.running_offline.values() if r.request_id.startswith(f"{batch_id}:")]
        for request in running + queues.pool.cancel_batch(batch_id):
            self._end(request, FinishReason.ABORT)
        if self.recorder is not None:
            self.recorder.cancelled(batch_id)

    # ---- one step ----

    def step(self) -> StepOutputs:
        """Plans, runs and commits one step; returns everything there is to report, perhaps nothing."""
        timer = StepTimer(self._clock)
        try:
            plan = self.scheduler.schedule(timer.start_s)
        except PlanningError as error:
            self._fail(error.request)
            return StepOutputs(self._take_outputs(), [])
        timer.scheduled()
        if plan is None:
            if self.recorder is not None:
                self.recorder.idle(timer.start_s, self.scheduler)
            return StepOutputs(self._take_outputs(), [])
        for new in plan.new_requests:
            self._log("start", new.request_id)
        self._witness([part.request_id for part in plan.scheduled])
        result = self._executor.run(plan)
        self._witness([])
        timer.executed()
        self._commit(plan, result, timer.executed_at_s)
        if result.is_whole:
            self._learn(plan, timer.execute_s)
        if self.recorder is not None:
            self.recorder.step(plan, result, timer, self.scheduler)
        outputs = self._take_outputs()
        timer.committed()
        return StepOutputs(outputs, [step_stats(plan, result, timer, self.scheduler)])

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        self._cost_model.observe(plan.shape, seconds)
        self.scheduler.observe_step(plan, seconds)

    def _commit(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        step = self.scheduler.last
        assert step is not None
        spoiled = step.take_back(result.errors) if result.errors else ()
        for (request, _), part in zip(step.scheduled, plan.scheduled, strict=True):
            if request in spoiled:
                continue  # it read what a failed request of this step should have written
            try:
                self._commit_one(request, part, result, now_s)
            except Exception:
                self._fail(request)
        self.scheduler.observe_held(now_s)

    def _commit_one(self, request: Request, part: ScheduledRequest, result: StepResult, now_s: float) -> None:
        error = result.errors.get(part.request_id)
        if error is not None:
            if error == NUMERICAL_ERROR:
                self.kv.distrust(request)
            self._end(request, FinishReason.ERROR, error)
            return
        self.kv.publish(request)
        if part.request_id in result.prompt_logprobs:
            self._keep_prompt_logprobs(request, part, result)
        if part.sample:
            self._append_token(request, result, now_s)
        elif request.params.max_tokens == 0 and request.num_uncomputed_tokens == 0:
            request.first_token_s = now_s
            self._end(request, FinishReason.LENGTH)

    def _keep_prompt_logprobs(self, request: Request, part: ScheduledRequest, result: StepResult) -> None:
        entries = result.prompt_logprobs[part.request_id]
        known = len(request.prompt_logprobs) - part.num_computed_tokens  # recomputed ones, after a preemption
        request.prompt_logprobs += entries[max(known, 0) :]

    def _append_token(self, request: Request, result: StepResult, now_s: float) -> None:
        token_id = result.token_ids[request.request_id]
        params = request.params
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        if num_output_tokens == 0:
            request.first_token_s = now_s
        is_end = (token_id in self._eos_token_ids and not params.ignore_eos) or token_id in params.stop_token_ids
        if result.logprobs and (logprobs := result.logprobs.get(request.request_id)) is not None:
            request.unreported_logprobs.append(logprobs)
        if is_end and num_output_tokens >= params.min_tokens:
            self._end(request, FinishReason.STOP, stop_token_id=token_id)
            return
        request.token_ids.append(token_id)
        request.unreported_token_ids.append(token_id)
        if num_output_tokens + 1 >= params.max_tokens:
            self._end(request, FinishReason.LENGTH)
        elif request.report_every_step:
            self._outputs.append(self._report(request))

    # ---- outputs ----

    def _end(
        self, request: Request, reason: FinishReason, error: str | None = None, stop_token_id: int | None = None
    ) -> None:
        """The one place where an admitted or waiting request ends."""
        assert request.status is not RequestStatus.FINISHED
        if self.recorder is not None:
            self.recorder.ended(request, reason)
        output = self._report(request)
        output.finish_reason = reason
        output.error = error
        output.stop_token_id = stop_token_id
        self.scheduler.forget(request)
        self._outputs.append(output)
        self._log("end", request.request_id)

    def _fail(self, request: Request) -> None:
        """Ends a request that raised, from the except clause that caught it. Raises it again if that is too late."""
        logger.exception("request %s is given up", request.request_id)
        if request.status is RequestStatus.FINISHED:
            raise
        self._end(request, FinishReason.ERROR, INTERNAL_ERROR)

    def _report(self, request: Request) -> RequestOutput:
        output = RequestOutput(
            request_id=request.request_id,
            new_token_ids=request.unreported_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            scheduled_s=request.scheduled_s,
            first_token_s=request.first_token_s,
        )
        request.unreported_token_ids = []
        if request.params.logprobs is not None:
            output.logprobs = request.unreported_logprobs
            request.unreported_logprobs = []
        if request.params.prompt_logprobs is not None and not request.prompt_logprobs_reported:
            output.prompt_logprobs = request.prompt_logprobs
            request.prompt_logprobs_reported = True
        return output

    def _emit_terminal(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """Ends something that never became a request with state."""
        if self.recorder is not None:
            self.recorder.refused(request_id)
        self._outputs.append(RequestOutput(request_id, [], finish_reason=reason, error=error))
        self._log("end", request_id)

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- inspection ----

    def check_integrity(self) -> None:
        """Raises AssertionError if queues, block tables, pool and index do not agree."""
        queues = self.scheduler.queues
        self.kv.check_integrity(queues.running())
        assert all(r.status is RequestStatus.RUNNING for r in queues.running())
        assert all(r.status is RequestStatus.WAITING and not r.block_ids for r in queues.waiting_online)
        assert all(r.is_online for r in queues.running_online.values())
        assert not any(r.is_online for r in queues.running_offline.values())
        assert queues.num_running <= self._max_num_seqs
