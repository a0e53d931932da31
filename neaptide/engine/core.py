"""EngineCore: the loop. Messages in, one step, outputs out."""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.engine.interfaces import CostModel, Executor, HeadroomPredictor
from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    BatchDeadlineStatus,
    CancelBatch,
    PlanReady,
    RequestOutput,
    SetOffline,
    SetShareWeights,
    StepOutputs,
    StepStats,
    ToEngine,
)
from neaptide.engine.observer import EngineObserver, Observers
from neaptide.engine.offline.deadline_status import DeadlineJudge
from neaptide.engine.offline.planned import PlannedOrder
from neaptide.engine.offline.work import WholeDevice
from neaptide.engine.params import INTERNAL_ERROR, FinishReason
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId, is_row_of
from neaptide.engine.scheduler.base import PlanningError
from neaptide.engine.scheduler.policies import policy_of, set_up
from neaptide.engine.steps.commit import Committer
from neaptide.engine.steps.isolation import IsolatingExecutor, StepError
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.stats import step_stats
from neaptide.engine.steps.step import Step, take_back_copies
from neaptide.engine.steps.timer import StepTimer
from neaptide.engine.table import RequestTable

logger = logging.getLogger(__name__)

PLANNING_WINDOW_STEPS = 100
READ_AGAIN_S = 1.0
"""Time between two attempts to read a token file."""

Publish = Callable[[list[RequestOutput]], None]


class EngineCore:
    """Owns every request from acceptance to its one terminal output. Single-threaded.

    Args:
        eos_token_ids: the model's end-of-sequence tokens.
        observers: notified of every event; closed by ``close``.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
        clock: Clock,
        eos_token_ids: frozenset[int] = frozenset(),
        observers: Sequence[EngineObserver] = (),
    ) -> None:
        policy = policy_of(config.scheduler)
        block_size = config.cache.block_size
        self._max_num_tokens = min(config.scheduler.max_model_len, executor.num_blocks * block_size)
        """Most prompt and output tokens of one request."""
        table = RequestTable(config.scheduler.max_num_seqs, self._max_num_tokens, block_size)
        self.scheduler = set_up(policy, config, executor.num_blocks, table, cost_model, headroom)
        self.kv = self.scheduler.kv
        kv_tokens = int(config.scheduler.offline_max_kv_ratio * executor.num_blocks) * block_size
        whole = WholeDevice(cost_model, self.scheduler.max_step_tokens, config.scheduler.max_num_seqs, kv_tokens)
        self._outlooks = DeadlineJudge(whole)
        self._executor = IsolatingExecutor(executor)
        self._cost_model = cost_model
        self._clock = clock
        self._overlap_depth = config.scheduler.overlap_depth
        self._observers = Observers(observers)
        self._committer = Committer(self.scheduler, eos_token_ids, self._observers)
        self._in_flight: Step | None = None
        self._unread: list[AddBatch] = []
        """Batches whose token file could not be read."""
        self._read_again_at_s = 0.0
        self._planning_s: deque[float] = deque(maxlen=PLANNING_WINDOW_STEPS)
        """Time to plan each of the last steps."""
        self._starting_s: deque[float] = deque(maxlen=PLANNING_WINDOW_STEPS)
        """Time to plan and submit each of the last steps."""
        self._executed_at_s = -math.inf
        """When the last step ended."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None or self._committer.has_outputs

    def subscribe(self, observer: EngineObserver) -> None:
        """Notifies the observer of every later event."""
        self._observers.subscribe(observer)

    @property
    def has_step_in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def plan_at_s(self) -> float:
        """When to call ``step``: at once, or just before the step in flight is expected to end.

        A plan made too early makes an arrival wait for two steps. A plan made too late keeps the device idle, as does
        one that is planned for the expected end when the step ends early. So this subtracts the longest recent planning
        and submission, one more planning, and the prediction's margin.

        Submission counts: on a GPU the host launches hundreds of kernels in it. A host that returns after the step has
        ended would measure its own delay as step time, predict longer steps, and wait longer.
        """
        if self._in_flight is None or self._committer.has_outputs:
            return -math.inf
        needed_s = max(self._starting_s, default=0.0) + max(self._planning_s, default=0.0)
        return self._in_flight.earliest_end_s - needed_s

    def close(self) -> None:
        """Closes the observers and the executor."""
        self._observers.close()
        self._executor.close()

    # ---- messages ----

    def handle(self, message: ToEngine) -> None:
        now_s = self._clock.now()
        self._observers.message(message, now_s)
        if isinstance(message, AddRequest):
            try:
                self._add_request(message)
            except Exception:
                logger.exception("request %s could not be added", message.request_id)
                self._committer.refuse(message.request_id, INTERNAL_ERROR)
        elif isinstance(message, AbortRequest):
            for request_id in message.request_ids:
                self._abort(request_id, message.reason)
            self.scheduler.observe_held(now_s)  # If no request is left to run, no step reports this.
        elif isinstance(message, AddBatch):
            self._add_batch(message, now_s)
        elif isinstance(message, CancelBatch):
            self._cancel_batch(message.batch_id)
        elif isinstance(message, PlanReady):
            self.scheduler.queues.pool.follow(PlannedOrder.of(message))
        elif isinstance(message, SetOffline):
            self.scheduler.offline_paused = message.paused
        elif isinstance(message, SetShareWeights):
            self.scheduler.queues.pool.turns.set_weights(message.weights)

    def read_again(self) -> None:
        """Takes in the rows whose token file has become readable. To be called now and then."""
        if not self._unread or self._clock.now() < self._read_again_at_s:
            return
        unread, self._unread = self._unread, []
        for message in unread:
            self.handle(message)

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
            share=message.share,
        )
        if (error := self._refusal(request)) is not None:
            self._committer.refuse(request.request_id, error)
        elif request.is_online:
            self.scheduler.observe_arrival(request)
            self.scheduler.queues.add_online(request)
        else:
            self.scheduler.queues.pool.add_flex(request)

    def _add_batch(self, message: AddBatch, now_s: float) -> None:
        """Takes in rows of a batch. Rows that cannot run end at once and delay no other row.

        While the token file is missing or torn, all rows wait. The file may return, or the server cancels the batch.
        """
        try:
            refused = self.scheduler.queues.pool.add_batch(message, now_s, self._max_num_tokens)
        except (OSError, ValueError) as exception:
            num_rows = len(message.rows)
            logger.error("batch %s: %d rows wait for their token file: %r", message.batch_id, num_rows, exception)
            self._unread.append(message)
            self._read_again_at_s = now_s + READ_AGAIN_S
            return
        for row in refused:
            error = "the prompt is empty or the request does not fit into the KV cache"
            self._committer.refuse(str(RowId(message.batch_id, row)), error)
        self._outlooks.hurry()

    def _refusal(self, request: Request) -> str | None:
        """Why the request can never run, or None. The server checks first, so this guards against its bugs."""
        if not request.prompt_token_ids:
            return "the prompt is empty"
        if request.num_prompt_tokens + request.params.max_tokens > self._max_num_tokens:
            return "prompt and output exceed the context length or the KV cache"
        return None

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        queues = self.scheduler.queues
        request = queues.find(request_id)
        if request is None and (request := queues.pool.remove(request_id)) is None:
            return  # It has already ended.
        self._committer.end(request, reason)

    def _cancel_batch(self, batch_id: str) -> None:
        self._unread = [message for message in self._unread if message.batch_id != batch_id]
        queues = self.scheduler.queues
        running = [r for r in queues.running_offline.values() if is_row_of(r.request_id, batch_id)]
        preempted, wanted = queues.pool.cancel_batch(batch_id)
        for prefix_node, num_rows in wanted:
            self.kv.want_no_more((prefix_node,), num_rows)
        for request in running + preempted:
            self._committer.end(request, FinishReason.ABORT)
        self._observers.cancelled(batch_id)
        self._outlooks.hurry()

    # ---- one step ----

    def step(self, publish: Publish | None = None) -> StepOutputs:
        """Plans and starts a step; commits it (``overlap_depth`` 0) or the step before it (1).

        Returns all there is to report, perhaps nothing.

        Args:
            publish: sends a step's outputs as soon as they are known, before the step is recorded. They are then not
                returned. If one of them is terminal, all are returned: a reported end must already be recorded.
        """
        step = self._start_step()
        stats: list[StepStats] = []
        if self._overlap_depth:
            running, self._in_flight = self._in_flight, step
            if running is not None:
                stats.append(self._finish(running, publish))
        elif step is not None:
            stats.append(self._finish(step, publish))
        return StepOutputs(self._committer.take_outputs(), stats)

    def _start_step(self) -> Step | None:
        """The next step, submitted, or None if no request can run."""
        timer = StepTimer(self._clock)
        now_s = timer.start_s
        if self._in_flight is not None:
            now_s = max(now_s, self._in_flight.expected_end_s)
        self._observers.planning(now_s)
        self.scheduler.begin(now_s)
        try:
            draft = self.scheduler.draft(now_s)
        except PlanningError as error:
            self._announce_rows()
            self._committer.fail(error.request)
            return None
        self._announce_rows()
        if self._in_flight is not None and self._in_flight.takes_from(draft):
            return None
        step = self.scheduler.apply(draft, timer)
        timer.scheduled()
        self._planning_s.append(timer.schedule_s)
        if step is None:
            if self._in_flight is None:
                self._observers.idle(now_s, self.scheduler)
            return None
        if self._overlap_depth:
            _ = step.plan.request_ids  # Reads the ids now: by the commit, the slots may belong to other requests.
            step.note_published()
        self._observers.planned(step, draft, self.scheduler)
        step.starts_s = timer.scheduled_at_s
        step.handle = self._executor.submit(step.plan)
        self._starting_s.append(self._clock.now() - timer.start_s)
        return step

    def _announce_rows(self) -> None:
        for request in self.scheduler.queues.pool.take_first_materialized():
            self._observers.row(request)

    def _finish(self, step: Step, publish: Publish | None = None) -> StepStats:
        """Waits for a step and commits it, while the step in flight runs."""
        assert step.handle is not None
        timer, following = step.timer, self._in_flight
        try:
            result = self._executor.wait(step.plan, step.handle)
        except StepError as error:
            self._undo_in_flight()
            self.kv.invalidate_saves(step.plan.saves)
            take_back_copies(self.kv, step.plan)
            result = self._take_apart(step, error.__cause__)
        self.kv.loaded(step.plan.loads)
        timer.executed(self._executed_at_s)
        self._executed_at_s = timer.executed_at_s
        if self._in_flight is not None:
            self._in_flight.starts_s = max(self._in_flight.timer.scheduled_at_s, timer.executed_at_s)
        self._observers.executed(step, result)
        if result.is_aborted:
            return self._give_up(step, result)
        self._committer.commit(step, result, following, timer.executed_at_s)
        if publish is not None and self._committer.has_tokens_alone:
            publish(self._committer.take_outputs())
        self.scheduler.observe_held(timer.executed_at_s)
        if result.is_whole:
            self._cost_model.observe(step.plan.shape, timer.execute_s - result.mask_s)
            self.scheduler.observe_masks(min(result.mask_s, step.plan.mask_limit_s))
            self.scheduler.observe_step(step, timer.execute_s)
        timer.committed()
        self._observers.committed(step, result, self.scheduler)
        return step_stats(step, result, self.scheduler)

    def _give_up(self, step: Step, result: StepResult) -> StepStats:
        """The step was aborted by an online arrival; discard its results."""
        assert self._in_flight is None  # No step is planned on top of an abortable step.
        self.scheduler.give_up(step)
        self.scheduler.observe_held(step.timer.executed_at_s)
        step.timer.committed()
        self._observers.given_up(step, self.scheduler)
        return step_stats(step, result, self.scheduler)

    def _undo_in_flight(self) -> None:
        """Undoes the step that was planned on a failed one; its requests compute the same tokens again."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            assert step.handle is not None
            with contextlib.suppress(StepError):
                self._executor.wait(step.plan, step.handle)
            self.scheduler.undo(step)
            self._observers.undone(step)

    def _take_apart(self, step: Step, error: BaseException | None) -> StepResult:
        """Result of a step that raised, for the rows whose requests have not changed since."""
        current = np.flatnonzero(step.is_current())
        if not len(current):
            self.scheduler.tell_again(step.plan)
        return self._executor.take_apart(step.plan, current, error)

    # ---- inspection ----

    def report_outlooks(self) -> list[BatchDeadlineStatus] | None:
        """Deadline status of each batch; None if it was reported a moment ago."""
        queues = self.scheduler.queues
        rate = queues.pool.turns.rate_tokens_per_s
        return self._outlooks.report(queues.pool.jobs, queues.table, rate, self._clock.now())

    def check_integrity(self) -> None:
        """Raises AssertionError if queues, slots, block tables, pool and index do not agree."""
        self.scheduler.queues.check_integrity()
