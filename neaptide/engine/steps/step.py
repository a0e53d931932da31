"""A step from planning to commit: one object that passes through the loop."""

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
    """What was planned, what it was planned from, and the handle of what runs."""

    plan: StepPlan
    draft: Draft
    preempted: PreemptionCount
    """Since the step before: by this draft, and by drafts in which nothing could run."""
    epochs: IntArray
    """[parts] of the rows; a row of another epoch by now has nothing to do with this step any more."""
    num_epochs: int
    """Of the table, when the step was planned."""
    is_online: BoolArray
    """[parts] whose request is an online one."""
    timer: StepTimer
    handle: StepHandle | None = None
    publishes_when_planned: bool = False
    starts_s: float = 0.0
    """When the device takes it up, as far as is known: at once, or when the step before it is done."""
    _published: dict[int, list[tuple[int, bytes]]] = field(init=False, default_factory=dict)
    """By part: blocks that it published when it was planned, and their hashes."""
    started: list[Request] = field(init=False, default_factory=list)
    """Requests that no step before it has run."""

    @property
    def are_all_current(self) -> bool:
        """Whether no row at all has changed hands since the step was planned."""
        return self.plan.table.num_epochs == self.num_epochs

    def is_current(self) -> BoolArray:
        """[parts] whether the part's row is still of the step's epoch."""
        current: BoolArray = self.plan.table.epoch[self.plan.rows] == self.epochs
        return current

    def takes_from(self, draft: Draft) -> bool:
        """Whether the draft preempts a request that takes part in this step.

        Such a draft waits until the step is committed, or the request would lose its new token, compute it again, lose
        it again: two that make way for each other in turn would never come to an end.
        """
        step = self.plan.step
        return any(action.request.last_step == step for action in draft.actions if isinstance(action, Preempt))

    @property
    def expected_end_s(self) -> float:
        return self.starts_s + self.plan.predicted_s

    @property
    def earliest_end_s(self) -> float:
        """It takes as much less than predicted as it may take more."""
        return self.expected_end_s - self.plan.margin_s

    def note_published(self) -> None:
        """Keeps what the step has published before it is computed, for requests that end while it runs."""
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
        """Undoes the publishing of tokens that were planned and not computed, because their requests failed.

        Requests that read such blocks in this step keep the part of their prefix hit that is sound, and compute the
        rest again: what the steps in flight compute for them is dropped.

        Args:
            lost: blocks that hold nothing sound; those of this step are added.
            ending: requests that failed in the step before: such blocks are their own.
        """
        if not self.publishes_when_planned:
            return
        plan = self.plan
        # A reader stands behind those whose blocks it reads.
        for index, is_current in enumerate(self.is_current().tolist()):
            has_failed = plan.request_ids[index] in failed
            if not is_current:
                if has_failed:
                    lost.update(kv.disown(self._published.get(index, ())))
                continue
            request = plan.table.request(int(plan.rows[index]))
            num_sound = next((i for i, block in enumerate(request.block_ids) if block in lost), None)
            if (num_sound is None and not has_failed) or request.request_id in ending:
                continue
            lost.update(kv.retract(request, int(plan.num_computed[index])))
            if num_sound is not None:
                kv.cut(request, num_sound)
                give_up_sampling(request)
                if request.num_preemptions == 0:
                    request.num_cached_tokens = request.num_computed_tokens

    def undo(self, kv: KVCacheManager) -> None:
        """The step ran in vain: progress and publishing go back, and the rows compute the same again.

        Rows that read in the step what others of it should have written start behind what is sound of their hit.
        """
        plan, table, before = self.plan, self.plan.table, self.is_current()
        kv.distrust_saves(plan.saves)
        kv.loaded(plan.loads)
        take_back_copies(kv, plan)
        self.take_back(kv, set(plan.request_ids), kv.distrust_loads(plan.loads))
        current = self.is_current()
        rows, start, sample = plan.rows[current], plan.num_computed[current], plan.sample[current]
        table.computed[rows] = start
        # Before the step, the rows that sample had all their tokens planned.
        table.total[rows[sample]] = plan.ends[current][sample]
        # What such rows keep of their hit may be the failed step's: its commit looks at them once more.
        self.epochs[before] = table.epoch[plan.rows[before]]


def give_up_sampling(request: Request) -> None:
    """What steps in flight compute and sample for the request is to be dropped."""
    table, seat = request.table, request.seat
    assert table is not None
    table.total[seat] = table.known[seat]
    table.renew(seat)


def take_back_copies(kv: KVCacheManager, plan: StepPlan) -> None:
    """The step failed and may not have copied the slots that it should have: their tokens are computed again."""
    if plan.slot_copies is not None:
        for request in kv.distrust_copies(plan.slot_copies):
            give_up_sampling(request)


def await_tokens(plan: StepPlan, first_token_s: float) -> None:
    """The table's rows after planning: progress is noted, and a placeholder stands for each token being sampled.

    A token that ends its request by length needs none: nothing follows it.

    Args:
        first_token_s: when the step is expected to end; the time of the first tokens until it is known.
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
