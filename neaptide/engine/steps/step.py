"""State of a step from planning to commit."""

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from neaptide.engine.arrays import ONE, BoolArray, IntArray
from neaptide.engine.interfaces import StepHandle
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.request import Request
from neaptide.engine.scheduler.actions import Preempt, PreemptionCount
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepPlan
from neaptide.engine.steps.timer import StepTimer
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID


@dataclass(slots=True)
class Step:
    """A step's plan, the draft that it was made from, and the handle of its execution."""

    plan: StepPlan
    draft: Draft
    preempted: PreemptionCount
    """Preemptions since the step before, including those of drafts in which no request could run."""
    epochs: IntArray
    """[parts] epochs of the slots when the step was planned. A slot with another epoch has changed since."""
    num_epochs: int
    """The table's epoch count when the step was planned."""
    is_online: BoolArray
    """[parts] whether the request is online."""
    timer: StepTimer
    handle: StepHandle | None = None
    publishes_when_planned: bool = False
    starts_s: float = 0.0
    """When the device starts it, as far as is known: at once, or when the step before it is done."""
    _published: dict[int, list[tuple[int, bytes]]] = field(init=False, default_factory=dict)
    """Blocks published when the step was planned, and their hashes, by part."""
    recomputed_tokens: int = 0
    """Tokens that its requests compute again, after a preemption or a late mask."""
    started: list[Request] = field(init=False, default_factory=list)
    """Requests that this step is the first to run."""

    @property
    def are_all_current(self) -> bool:
        """Whether no slot of the table has changed since the step was planned."""
        return self.plan.table.num_epochs == self.num_epochs

    def is_current(self) -> BoolArray:
        """[parts] whether the part's slot has not changed since the step was planned."""
        current: BoolArray = self.plan.table.epoch[self.plan.rows] == self.epochs
        return current

    def takes_from(self, draft: Draft) -> bool:
        """Whether the draft preempts a request that is scheduled in this step.

        Such a draft waits for the step's commit. Otherwise the request would lose its new token and compute it again.
        Two requests that preempt each other in turn would then never finish.
        """
        step = self.plan.step
        return any(action.request.last_step == step for action in draft.actions if isinstance(action, Preempt))

    @property
    def expected_end_s(self) -> float:
        return self.starts_s + self.plan.predicted_s

    @property
    def earliest_end_s(self) -> float:
        """Expected end minus the margin of the prediction."""
        return self.expected_end_s - self.plan.margin_s

    def note_published(self) -> None:
        """Records the blocks published before they are computed, for requests that end while the step runs."""
        plan, table = self.plan, self.plan.table
        start = plan.num_computed // table.blocks.block_size
        for index in np.flatnonzero(table.indexed[plan.rows] > start).tolist():
            request, first = table.request(int(plan.rows[index])), int(start[index])
            last = request.num_indexed_blocks
            self._published[index] = list(
                zip(request.block_ids[first:last], request.block_hashes[first:last], strict=True)
            )

    def take_back(
        self, kv: KVCacheManager, failed: Container[str], lost: set[int], ending: Container[str] = ()
    ) -> None:
        """Undoes the publication of planned tokens that were not computed because their requests failed.

        Requests that read such blocks in this step keep the valid part of their prefix hit. They compute the rest
        again, and the results of steps in flight for them are dropped.

        Args:
            lost: blocks without valid KV; those of this step are added.
            ending: requests that failed in the step before, to which such blocks belong.
        """
        if not self.publishes_when_planned:
            return
        plan = self.plan
        # Requests come after those whose blocks they read.
        for index, is_current in enumerate(self.is_current().tolist()):
            has_failed = plan.request_ids[index] in failed
            if not is_current:
                if has_failed:
                    lost.update(kv.disown(self._published.get(index, ())))
                continue
            request = plan.table.request(int(plan.rows[index]))
            num_committed = next((i for i, block in enumerate(request.block_ids) if block in lost), None)
            if (num_committed is None and not has_failed) or request.request_id in ending:
                continue
            lost.update(kv.retract(request, int(plan.num_computed[index])))
            if num_committed is not None:
                kv.cut(request, num_committed)
                void_sampling(request)
                if request.num_preemptions == 0:
                    request.num_cached_tokens = request.num_computed_tokens

    def undo(self, kv: KVCacheManager) -> None:
        """Undoes the step: progress and publications are reverted, and its requests compute the same tokens again.

        Requests that read blocks of other requests of the step restart after the valid part of their hit.
        """
        plan, table, before = self.plan, self.plan.table, self.is_current()
        kv.invalidate_saves(plan.saves)
        kv.loaded(plan.loads)
        take_back_copies(kv, plan)
        self.take_back(kv, set(plan.request_ids), kv.invalidate_loads(plan.loads))
        current = self.is_current()
        rows, start, sample = plan.rows[current], plan.num_computed[current], plan.sample[current]
        table.computed[rows] = start
        # Before the step, all tokens of the sampling slots were planned.
        table.total[rows[sample]] = plan.ends[current][sample]
        # The hit of such slots may come from the failed step, whose commit checks them again.
        self.epochs[before] = table.epoch[plan.rows[before]]


def void_sampling(request: Request) -> None:
    """Drops the results of steps in flight for the request."""
    table, slot = request.table, request.slot
    assert table is not None
    table.total[slot] = table.known[slot]
    table.renew(slot)


def take_back_copies(kv: KVCacheManager, plan: StepPlan) -> None:
    """Handles slot copies of a failed step, which may be missing: their tokens are computed again."""
    if plan.slot_copies is not None:
        for request in kv.invalidate_copies(plan.slot_copies):
            void_sampling(request)


def await_tokens(plan: StepPlan, first_token_s: float) -> None:
    """Updates the table after planning: progress, and a placeholder for each token being sampled.

    A token that ends its request by length needs no placeholder, as nothing follows it.

    Args:
        first_token_s: expected end of the step; serves as the time of first tokens until it is known.
    """
    table, rows, ends = plan.table, plan.rows, plan.ends
    table.computed[rows] = ends
    table.last_step[rows] = plan.step
    total = ends + ONE
    sampling = plan.sample & (total < table.limit[rows])
    if np.count_nonzero(sampling) < len(rows):
        rows, ends, total = rows[sampling], ends[sampling], total[sampling]
    table.tokens[rows, ends] = PLACEHOLDER_TOKEN_ID
    table.total[rows] = total
    if not plan.is_continued:
        table.first_token_s[plan.rows[plan.sample & (plan.output_position == 0)]] = first_token_s
