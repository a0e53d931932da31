"""EngineCore: the loop. Messages in, one step, outputs out."""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from neaptide.engine.clock import Clock
from neaptide.engine.config import CacheConfig, EngineConfig
from neaptide.engine.interfaces import CostModel, Executor, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.kv.two_tenant_cache import TwoTenantCache
from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    BatchOutlook,
    CancelBatch,
    PlanReady,
    RequestOutput,
    SetOffline,
    StepOutputs,
    StepStats,
    ToEngine,
)
from neaptide.engine.observer import EngineObserver, Observers
from neaptide.engine.offline.outlook import Outlooks
from neaptide.engine.offline.planned import PlannedOrder
from neaptide.engine.offline.work import WholeDevice
from neaptide.engine.params import INTERNAL_ERROR, FinishReason
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId, is_row_of
from neaptide.engine.scheduler.base import PlanningError, Scheduler
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
"""Between two tries to read a token file."""

Publish = Callable[[list[RequestOutput]], None]


def _kv_cache(config: CacheConfig, policy: type[Scheduler], num_blocks: int, table: RequestTable) -> KVCacheManager:
    """The cache that the policy wants, as far as the executor and its host memory allow it."""
    if policy.shares_blocks and config.two_tenant_blocks and config.num_host_blocks:
        return TwoTenantCache(num_blocks, table, config.num_host_blocks)
    prefix_cache = config.enable_prefix_cache and policy.uses_prefix_cache
    host_blocks = config.num_host_blocks if policy.evicts_by_reuse else 0
    return KVCacheManager(num_blocks, table, prefix_cache, policy.evicts_by_reuse, policy.counts_reuse, host_blocks)


class EngineCore:
    """Owns every request from acceptance to its one terminal output. Single-threaded.

    Args:
        eos_token_ids: the model's end-of-sequence tokens.
        observers: told of everything; closed by ``close``.
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
        """Prompt and output tokens of one request at most."""
        table = RequestTable(config.scheduler.max_num_seqs, self._max_num_tokens, block_size)
        self.kv = _kv_cache(config.cache, policy, executor.num_blocks, table)
        self.scheduler = set_up(policy, config.scheduler, self.kv, cost_model, headroom)
        kv_tokens = int(config.scheduler.offline_max_kv_ratio * executor.num_blocks) * block_size
        whole = WholeDevice(cost_model, self.scheduler.max_step_tokens, config.scheduler.max_num_seqs, kv_tokens)
        self._outlooks = Outlooks(whole)
        self._executor = IsolatingExecutor(executor)
        self._cost_model = cost_model
        self._clock = clock
        self._overlap_depth = config.scheduler.overlap_depth
        self._observers = Observers(observers)
        self._committer = Committer(self.scheduler, eos_token_ids, self._observers)
        self._in_flight: Step | None = None
        self._unread: list[AddBatch] = []
        """Rows whose token file could not be read."""
        self._read_again_at_s = 0.0
        self._planning_s: deque[float] = deque(maxlen=PLANNING_WINDOW_STEPS)
        """Of the last steps ..."""
        self._starting_s: deque[float] = deque(maxlen=PLANNING_WINDOW_STEPS)
        """... and until the executor had taken what was planned."""
        self._executed_at_s = -math.inf
        """When the last step was done."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None or self._committer.has_outputs

    def subscribe(self, observer: EngineObserver) -> None:
        """From now on the observer is told of everything as well."""
        self._observers.subscribe(observer)

    @property
    def has_step_in_flight(self) -> bool:
        return self._in_flight is not None

    @property
    def plan_at_s(self) -> float:
        """When ``step`` should be called: at once, or so late that the step in flight is nearly done.

        A plan made early would let an arrival wait for two steps; made at the last moment, it would keep the device
        waiting, and so would one that is made when the step is expected to end wherever it ends sooner. What planning
        and submitting took at most of late is kept, planning once more, and the prediction's margin.

        Submitting counts, for on a GPU the host launches hundreds of kernels in it. A host that was not back before the
        step in flight is done would take its own delay for the step's time, expect it of the next, and wait longer.
        """
        if self._in_flight is None or self._committer.has_outputs:
            return -math.inf
        needed_s = max(self._starting_s, default=0.0) + max(self._planning_s, default=0.0)
        return self._in_flight.earliest_end_s - needed_s

    def close(self) -> None:
        """Ends what watches the engine, and what computes for it."""
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
                logger.exception("request %s could not be taken in", message.request_id)
                self._committer.refuse(message.request_id, INTERNAL_ERROR)
        elif isinstance(message, AbortRequest):
            for request_id in message.request_ids:
                self._abort(request_id, message.reason)
            self.scheduler.observe_held(now_s)  # perhaps nothing is left to run, and no step will tell
        elif isinstance(message, AddBatch):
            self._add_batch(message, now_s)
        elif isinstance(message, CancelBatch):
            self._cancel_batch(message.batch_id)
        elif isinstance(message, PlanReady):
            self.scheduler.queues.pool.follow(PlannedOrder.of(message))
        elif isinstance(message, SetOffline):
            self.scheduler.offline_paused = message.paused

    def read_again(self) -> None:
        """Takes in rows whose token file could not be read, as far as it can be now. To be called now and then."""
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
        """Rows that cannot run end at once; none of the others waits for that. All wait where the token file is away or
        torn, which is no fault of theirs: it comes back, or whoever has sent them takes them back."""
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
        """Why the request can never run; the edge checks first, so this guards against a bug there."""
        if not request.prompt_token_ids:
            return "the prompt is empty"
        if request.num_prompt_tokens + request.params.max_tokens > self._max_num_tokens:
            return "prompt and output exceed the context length or the KV cache"
        return None

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        queues = self.scheduler.queues
        request = queues.find(request_id)
        if request is None and (request := queues.pool.remove(request_id)) is None:
            return  # it has ended already
        self._committer.end(request, reason)

    def _cancel_batch(self, batch_id: str) -> None:
        self._unread = [message for message in self._unread if message.batch_id != batch_id]
        queues = self.scheduler.queues
        running = [r for r in queues.running_offline.values() if is_row_of(r.request_id, batch_id)]
        preempted, wanted = queues.pool.cancel_batch(batch_id)
        for segment, num_rows in wanted:
            self.kv.want_no_more((segment,), num_rows)
        for request in running + preempted:
            self._committer.end(request, FinishReason.ABORT)
        self._observers.cancelled(batch_id)
        self._outlooks.hurry()

    # ---- one step ----

    def step(self, publish: Publish | None = None) -> StepOutputs:
        """Plans and starts a step, and commits the one before it while it runs (``overlap_depth`` 1) or itself (0).

        Returns everything there is to report, perhaps nothing.

        Args:
            publish: takes the outputs of a step as soon as they are known, before what it took is noted; they are not
                returned then. Where one of them is an end all are returned: whoever hears of an end finds it counted.
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
        """The next step, submitted; None if no request can run."""
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
            _ = step.plan.request_ids  # its rows may belong to others when it is committed
            step.note_published()
        self._observers.planned(step, draft, self.scheduler)
        step.starts_s = timer.scheduled_at_s
        step.handle = self._executor.submit(step.plan)
        self._starting_s.append(self._clock.now() - timer.start_s)
        return step

    def _announce_rows(self) -> None:
        for request in self.scheduler.queues.pool.take_first_looked_at():
            self._observers.row(request)

    def _finish(self, step: Step, publish: Publish | None = None) -> StepStats:
        """Waits for a step and commits it, while the one in flight runs."""
        assert step.handle is not None
        timer, following = step.timer, self._in_flight
        try:
            result = self._executor.wait(step.plan, step.handle)
        except StepError as error:
            self._undo_in_flight()
            self.kv.distrust_saves(step.plan.saves)
            take_back_copies(self.kv, step.plan)
            result = self._take_apart(step, error.__cause__)
        self.kv.loaded(step.plan.loads)
        timer.executed(self._executed_at_s)
        self._executed_at_s = timer.executed_at_s
        if self._in_flight is not None:
            self._in_flight.starts_s = max(self._in_flight.timer.scheduled_at_s, timer.executed_at_s)
        self._observers.executed(step, result)
        if result.is_given_up:
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
        """Nothing came of the step: an online request has come, and the next step is for that."""
        assert self._in_flight is None  # none is planned on a step that may be given up
        self.scheduler.give_up(step)
        self.scheduler.observe_held(step.timer.executed_at_s)
        step.timer.committed()
        self._observers.given_up(step, self.scheduler)
        return step_stats(step, result, self.scheduler)

    def _undo_in_flight(self) -> None:
        """A step that was planned on one that failed: it is waited for, and its rows compute the same again."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            assert step.handle is not None
            with contextlib.suppress(StepError):
                self._executor.wait(step.plan, step.handle)
            self.scheduler.undo(step)
            self._observers.undone(step)

    def _take_apart(self, step: Step, error: BaseException | None) -> StepResult:
        """The result of a step that raised, of those of its rows that still are what they were."""
        current = np.flatnonzero(step.is_current())
        if not len(current):
            self.scheduler.tell_again(step.plan)
        return self._executor.take_apart(step.plan, current, error)

    # ---- inspection ----

    def report_outlooks(self) -> list[BatchOutlook] | None:
        """Whether each batch will end in its window; None if that was reported a moment ago."""
        queues = self.scheduler.queues
        rate = queues.pool.turns.rate_tokens_per_s
        return self._outlooks.report(queues.pool.jobs, queues.table, rate, self._clock.now())

    def check_integrity(self) -> None:
        """Raises AssertionError if queues, seats, block tables, pool and index do not agree."""
        self.scheduler.queues.check_integrity()
