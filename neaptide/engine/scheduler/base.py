"""Base class of the scheduling policies: the queues, the frame of a step, and its plan."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.config import CacheConfig, SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.row_source import RowKey
from neaptide.engine.offline.sharing.by_shares import ByShares
from neaptide.engine.offline.turns import Turns
from neaptide.engine.request import Request
from neaptide.engine.scheduler.actions import (
    Admit,
    DrawPool,
    Grow,
    OnCache,
    Preempt,
    PreemptionCount,
    Schedule,
    ScheduleRows,
)
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.queues import OnlineOrder, Queues, deadline_order
from neaptide.engine.steps.plan import BatchShape, NewRequest, StepPlan
from neaptide.engine.steps.step import Step, await_tokens
from neaptide.engine.steps.timer import StepTimer
from neaptide.engine.table import RequestTable

MASK_SHARE = 0.05
"""Cap on a step's wait for masks that it can go on without, as a fraction of the TPOT target."""
MASK_MEMORY_STEPS = 8
"""Time constant of the expected mask wait, in steps."""
LEAST_MASK_WAIT_S = 1e-5
CacheMaker = Callable[[CacheConfig, int, RequestTable], KVCacheManager | None]
"""Makes a KV cache from its configuration, the number of blocks and the request table."""


class PlanningError(Exception):
    """Planning failed at one request; nothing has changed."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"planning failed at {request.request_id}")
        self.request = request


class Scheduler(ABC):
    """Plans steps. Owns the queues; independent of tensors, sockets and wall clocks.

    A policy chooses the scheduled requests of a step in ``pack``. ``draft`` changes nothing; only ``apply`` changes
    queues, slots and the cache.
    """

    online_order: ClassVar[OnlineOrder] = staticmethod(deadline_order)
    """Order of the waiting online requests."""
    row_key: ClassVar[RowKey | None] = None
    """Order of a job's lines in the offline pool; None is file order, or that of its prefix tree."""
    follows_prefixes: ClassVar[bool] = False
    """Whether lines of a job that share a prefix are admitted one after another."""
    has_shares: ClassVar[bool] = False
    """Whether tenants take turns in the offline pool. Otherwise flex requests come first, then jobs by deadline."""
    puts_urgent_jobs_first: ClassVar[bool] = True
    """Whether jobs that would be late otherwise go before turns."""
    planned_order: ClassVar[str | None] = None
    """Name of the order that the planner makes of the offline pool; None for no plan."""
    server_order: ClassVar[str | None] = None
    """Like ``planned_order``, for a policy that works without a plan too. A server plans it where its device gains by
    it or the operator asks for it."""
    uses_prefix_cache: ClassVar[bool] = True
    """Whether requests reuse the cached blocks of earlier ones with the same prefix. Only if the server allows it."""
    evicts_by_reuse: ClassVar[bool] = False
    """Whether cached blocks that a job's lines still need stay longest; otherwise the oldest go first."""
    counts_reuse: ClassVar[bool] = False
    """Whether expected reuse is the exact number of lines; otherwise it is in classes that double."""
    own_cache: ClassVar[CacheMaker | None] = None
    """Makes a KV cache of the policy's own. Returns None where the executor does not support that cache: the policy
    then has the engine's."""
    publishes_when_planned: ClassVar[bool] = False
    """Whether requests of a step find the blocks that earlier ones of it will fill; otherwise they find computed blocks
    only."""
    publishes_decodes_when_planned: ClassVar[bool] = False
    """Whether ``publishes_when_planned`` covers the blocks that decodes fill."""
    abortable_steps: ClassVar[bool] = False
    """Whether an online arrival aborts its steps without online work, if the executor can do that."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        self.config = config
        """Limits and targets."""
        self.max_step_tokens = type(self).step_tokens(config)
        """Most tokens computed in one step."""
        pool = OfflinePool(type(self).row_key, type(self).follows_prefixes, type(self).turns(config))
        pool.kv_tokens = kv.num_blocks * kv.block_size
        self.queues = Queues(kv, pool, type(self).online_order)
        """The requests. A policy looks at them through the draft."""
        self.kv = kv
        """The KV cache. A policy looks at it through ``draft.kv``."""
        self.offline_paused = False
        """Whether offline work must not run now."""
        self.cost_model = cost_model
        """Predicts the time of a step."""
        self.headroom = headroom
        """Predicts the memory that online requests will need."""
        self.index = 0
        """Number of the step that is planned, or was planned last."""
        self.mask_limit_s = MASK_SHARE * config.tpot_slo_s
        """Longest wait of a step for masks, in seconds."""
        self.mask_wait_s = 0.0
        """Expected wait of a step for masks, in seconds."""
        self.preempted = PreemptionCount()
        """Preemptions by drafts since the last step."""
        self._preempted_ids: list[str] = []
        self._finished_ids: list[str] = []
        self._zero_blocks: list[int] = []
        self._aborted_index = -1
        """Number of the step that was aborted last."""
        self._untold: list[Request] = []
        """Requests that started in an undone step. The executor gets them with the next step that schedules them."""

    @classmethod
    def step_tokens(cls, config: SchedulerConfig) -> int:
        """Most tokens computed in one step; a policy that cannot split prompts must allow whole ones."""
        return config.max_num_batched_tokens

    @classmethod
    def turns(cls, config: SchedulerConfig) -> Turns | None:
        """Order of the lanes of the offline pool; None without tenants."""
        return ByShares(config.share_weights, cls.puts_urgent_jobs_first) if cls.has_shares else None

    @abstractmethod
    def pack(self, draft: Draft) -> float:
        """Fills the draft; returns its time budget in seconds (``math.inf`` for none).

        ``draft.at`` is the request being considered, or None; it is at fault if this raises. Only the draft may be
        changed; state that the policy needs later goes into ``draft.notes``.
        """

    def remember(self, draft: Draft) -> None:  # noqa: B027 (a policy need not remember anything)
        """Takes over the notes of an applied draft."""

    def observe_arrival(self, request: Request) -> None:
        """Notes the arrival of an accepted online request."""
        self.headroom.observe_arrival(request.arrival_s)

    def observe_held(self, now_s: float) -> None:
        """Updates the forecast after blocks were allocated or freed."""
        self.headroom.observe(now_s, self.kv.num_online)

    def observe_step(self, step: Step, seconds: float) -> None:  # noqa: B027 (a policy need not learn)
        """Learns from the measured time of a planned step."""

    def observe_masks(self, waited_s: float) -> None:
        """Updates the expected mask wait of a step."""
        self.mask_wait_s += (waited_s - self.mask_wait_s) / MASK_MEMORY_STEPS
        if self.mask_wait_s < LEAST_MASK_WAIT_S:
            self.mask_wait_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether any request could run (offline work does not count while it is paused)."""
        queues = self.queues
        if queues.waiting_online or queues.running_online:
            return True
        return not self.offline_paused and bool(queues.running_offline or len(queues.pool))

    def forget(self, request: Request) -> None:
        """Removes an ended request; the executor learns of it with the next plan."""
        self.kv.want_no_more(request.prefix_nodes)
        if not request.is_online:
            self.queues.pool.ended(request)
        self.queues.finish(request)
        is_untold = request in self._untold
        if is_untold:
            self._untold.remove(request)
        if request.known_to_executor or is_untold:
            self._finished_ids.append(request.request_id)

    def begin_again(self, request: Request) -> None:
        """Restarts a request without the prefix cache, which may have corrupted its KV."""
        request.trusts_cache = False
        request.num_cached_tokens = 0
        self.preempted.add(request)
        self._preempt(request)

    def _preempt(self, request: Request) -> None:
        if request.known_to_executor:
            self._preempted_ids.append(request.request_id)
        self.queues.preempt(request)

    def zero(self, block_ids: list[int]) -> None:
        """Has the next plan clear free blocks whose content must not be read, not even masked."""
        self._zero_blocks += block_ids

    def undo(self, step: Step) -> None:
        """Undoes an applied step. It will be planned anew, and the executor gets its changes again."""
        plan = step.plan
        new = {new.request_id for new in plan.new_requests}
        started = new.union(plan.resumed_ids)
        for index in np.flatnonzero(step.is_current()).tolist():
            if plan.request_ids[index] in started:
                request = plan.table.request(int(plan.rows[index]))
                request.known_to_executor = request.request_id not in new
                self._untold.append(request)
        step.undo(self.kv)
        self.tell_again(plan)
        self.preempted.add_all(step.preempted)

    def give_up(self, step: Step) -> None:
        """Undoes an aborted step. The next step cannot be aborted, so that there is always progress."""
        self.undo(step)
        self._aborted_index = step.plan.step

    def tell_again(self, plan: StepPlan) -> None:
        """Repeats the ended and preempted requests of a plan that may not have reached the executor."""
        self._finished_ids += plan.finished_ids
        self._preempted_ids += plan.preempted_ids

    def begin(self, now_s: float) -> None:
        """Prepares the planning of a step."""
        self.index += 1
        self.observe_held(now_s)
        if self.kv.has_host:
            self.kv.set_copy_price(self._copy_price())
        self.queues.pool.begin_step(now_s, self.offline_paused)
        self.kv.look_up_uses(self.queues.pool.take_moved_nodes())

    def _copy_price(self) -> float:
        """Cost of copying a block to or from host memory, relative to computing it.

        It is measured in full steps, because a small prompt adds nothing to the time of reading the weights.
        """
        num_blocks = self._full_blocks()
        copies, nothing = BatchShape(swapped_blocks=num_blocks), self.cost_model.predict(BatchShape()).seconds
        copies_s = self.cost_model.predict(copies).seconds - nothing
        again_s = num_blocks * self.block_s()
        return copies_s / again_s if again_s > 0.0 else 0.0

    def online_return_s(self, draft: Draft, num_blocks: int, keep: Collection[int] = ()) -> float:
        """Seconds of computing that evictions for ``num_blocks`` new blocks are expected to cost online requests.

        Counts the evicted blocks that online requests read last and no request is known to need, times the share of
        such blocks that is hit again (``OnlineReturns``), times the time to compute a block. O(1), but for ``keep``.

        Args:
            keep: blocks that the requester will read (its prefix hit), which are not evicted.
        """
        num_evicted = draft.kv.num_online_evicted(num_blocks, keep)
        return num_evicted * self.kv.online_return_share * self.block_s() if num_evicted else 0.0

    def block_s(self) -> float:
        """Time that a block of prompt tokens adds to a full step."""
        num_blocks = self._full_blocks()
        full = BatchShape()
        full.add(num_blocks * self.kv.block_size, 0)
        empty_s = self.cost_model.predict(BatchShape()).seconds
        return max(self.cost_model.predict(full).seconds - empty_s, 0.0) / num_blocks

    def _full_blocks(self) -> int:
        """Blocks of prompt tokens in a full step."""
        return max(self.config.max_num_batched_tokens // self.kv.block_size, 1)

    def draft(self, now_s: float) -> Draft:
        """The policy's next step. Changes nothing.

        Raises:
            PlanningError: a request could not be planned for.
        """
        budget = StepBudget(self.cost_model, self.max_step_tokens, self.mask_wait_s)
        policy = type(self)
        draft = Draft(
            self.index,
            now_s,
            self.queues,
            budget,
            policy.publishes_when_planned,
            policy.publishes_decodes_when_planned,
        )
        draft.is_abortable = self._is_abortable(draft)
        try:
            draft.limit_s = self.pack(draft)
        except Exception as error:
            if draft.at is None:
                raise
            raise PlanningError(draft.at) from error
        draft.at = None
        return draft

    def _is_abortable(self, draft: Draft) -> bool:
        if not self.config.abortable_steps or not type(self).abortable_steps or self.index == self._aborted_index + 1:
            return False
        return not self.queues.running_online and not draft.waiting_online

    def apply(self, draft: Draft, timer: StepTimer) -> Step | None:
        """Executes the draft: returns the step to run, or None if it schedules no request.

        The draft must be made from the present state. Then nothing here can fail: the cache repeats in order what the
        draft did.
        """
        if self.kv.has_host:
            self.kv.pin(action.hit for action in draft.actions if isinstance(action, Admit))
        admissions: list[tuple[Request, int]] = []
        rows, num_tokens = self._act(draft, admissions)
        self.preempted.add_all(draft.preempted)
        self.remember(draft)
        if not len(rows):
            return None
        plan = self._plan(draft, rows, num_tokens)
        table = plan.table
        step = Step(plan, draft, self.preempted, table.epoch[rows], table.num_epochs, table.online[rows], timer)
        step.publishes_when_planned = type(self).publishes_when_planned
        step.recomputed_tokens = table.num_recomputed(rows, plan.num_computed, plan.ends)
        self.preempted = PreemptionCount()
        for request, cached_tokens in admissions:
            if not request.known_to_executor:
                request.num_cached_tokens, request.scheduled_s = cached_tokens, draft.now_s
        if admissions or self._untold:
            step.started = self._tell(plan, [request for request, _ in admissions])
        await_tokens(plan, draft.now_s + plan.predicted_s)
        return step

    def _tell(self, plan: StepPlan, starting: list[Request]) -> list[Request]:
        """Adds the requests that start with the step, or started in an undone one, to the plan.

        Returns those that no step has run before.
        """
        if self._untold:
            scheduled_rows = set(plan.request_ids)
            again = [request for request in self._untold if request.request_id in scheduled_rows]
            self._untold = [request for request in self._untold if request.request_id not in scheduled_rows]
            starting = list(dict.fromkeys(again + starting))
        plan.resumed_ids += [request.request_id for request in starting if request.num_preemptions]
        new = [request for request in starting if not request.known_to_executor]
        for request in new:
            plan.new_requests.append(NewRequest(request.request_id, request.prompt_token_ids, request.params))
            request.known_to_executor = True
        return new

    def _act(self, draft: Draft, admissions: list[tuple[Request, int]]) -> tuple[IntArray, IntArray]:
        """Executes the draft's actions and collects the admissions; returns slots and token counts of its parts."""
        queues, kv, publishes = self.queues, self.kv, type(self).publishes_when_planned
        publishes_decodes = type(self).publishes_decodes_when_planned
        rows, num_tokens, count = np.empty(draft.num_parts, np.int64), np.empty(draft.num_parts, np.int64), 0
        num_tokens.fill(1)
        for action in draft.actions:
            match action:
                case Schedule(request, tokens):
                    kv.grow(request, tokens)
                    if publishes:
                        kv.publish(request, request.num_computed_tokens + tokens)
                    rows[count], num_tokens[count] = request.slot, tokens
                    count += 1
                case ScheduleRows(scheduled_rows, full):
                    kv.grow_rows(full)
                    if publishes_decodes:
                        for request in queues.table.requests_of(scheduled_rows):
                            kv.publish(request, request.num_computed_tokens + 1)
                    rows[count : count + len(scheduled_rows)] = scheduled_rows
                    count += len(scheduled_rows)
                case Admit(request, hit):
                    queues.start(request)
                    kv.admit(request, hit)
                    admissions.append((request, hit.num_tokens))
                case Preempt(request):
                    self._preempt(request)
                case Grow(request, tokens):
                    kv.grow(request, tokens)
                case OnCache(act):
                    act(kv)
                case DrawPool(num_requests):
                    queues.pool.draw(num_requests)
        return rows, num_tokens

    def _plan(self, draft: Draft, rows: IntArray, num_tokens: IntArray) -> StepPlan:
        table, shape = self.queues.table, draft.budget.shape
        saves, loads = self.kv.take_copies()
        slot_copies = self.kv.take_slot_copies()
        shape.swapped_blocks = len(saves) + len(loads)
        shape.copied_aside_blocks = slot_copies.num_blocks(self.kv.block_size) if slot_copies is not None else 0
        seconds, margin_s = draft.budget.prediction
        start, total, prompt = table.computed[rows], table.total[rows], table.prompt[rows]
        ends, output_position = start + num_tokens, total - prompt
        sample = (ends == total) & (table.limit[rows] > prompt)
        are_decodes = shape.decode_requests == len(rows) == int(np.count_nonzero(sample))
        plan = StepPlan(
            step=draft.index,
            shape=shape,
            table=table,
            rows=rows,
            num_tokens=num_tokens,
            num_computed=start,
            sample=sample,
            output_position=output_position,
            finished_ids=self._finished_ids,
            preempted_ids=self._preempted_ids,
            zero_blocks=self._zero_blocks,
            saves=saves,
            loads=loads,
            slot_copies=slot_copies,
            predicted_s=seconds,
            margin_s=margin_s,
            mask_limit_s=self.mask_limit_s,
            budget_s=draft.limit_s if math.isfinite(draft.limit_s) else 0.0,
            is_continued=are_decodes and int(np.count_nonzero(output_position)) == len(rows),
            _ends=ends,
        )
        copies_nothing = not saves and not loads and slot_copies is None
        if draft.is_abortable and copies_nothing and draft.arrival_waits_s < seconds:
            plan.abortable_share = min(1.0 - draft.arrival_waits_s / seconds, 1.0)
        self._finished_ids, self._preempted_ids, self._zero_blocks = [], [], []
        return plan
