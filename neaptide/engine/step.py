"""A step from planning to commit: one object that passes through the loop."""

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np

from neaptide.engine.batch import StepPlan
from neaptide.engine.interfaces import StepHandle
from neaptide.engine.kv.block_table import IntArray
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.request import Request
from neaptide.engine.scheduler.draft import Draft, PreemptionCount
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID, BoolArray
from neaptide.engine.timer import StepTimer


@dataclass(slots=True)
class Step:
    """What was planned, what it was planned from, and the handle of what runs."""

    plan: StepPlan
    draft: Draft
    preempted: PreemptionCount
    """Since the step before: by this draft, and by drafts in which nothing could run."""
    epochs: IntArray
    """[parts] of the rows; a row of another epoch by now has nothing to do with this step any more."""
    is_online: BoolArray
    """[parts] whose request is an online one."""
    timer: StepTimer
    handle: StepHandle | None = None
    publishes_when_planned: bool = False
    cached_tokens: int = field(init=False, default=0)
    """Prompt tokens that the step's first admissions found in the prefix cache."""
    admitted_prompt_tokens: int = field(init=False, default=0)
    online_cached_tokens: int = field(init=False, default=0)
    online_admitted_prompt_tokens: int = field(init=False, default=0)

    @property
    def ends(self) -> IntArray:
        """[parts] tokens whose KV is in the cache after the step."""
        return self.plan.num_computed + self.plan.num_tokens

    def is_current(self) -> BoolArray:
        """[parts] whether the part's row is still of the step's epoch."""
        current: BoolArray = self.plan.table.epoch[self.plan.rows] == self.epochs
        return current

    def count_admission(self, request: Request, cached_tokens: int) -> None:
        """Notes the first admission of a request."""
        self.cached_tokens += cached_tokens
        self.admitted_prompt_tokens += request.num_prompt_tokens
        if request.is_online:
            self.online_cached_tokens += cached_tokens
            self.online_admitted_prompt_tokens += request.num_prompt_tokens

    @property
    def expected_end_s(self) -> float:
        return self.draft.now_s + self.plan.predicted_s

    def take_back(self, kv: KVCacheManager, failed: Container[str], lost: set[int]) -> None:
        """Undoes the publishing of tokens that were planned and not computed, because their requests failed.

        Requests that read such blocks in this step keep the part of their prefix hit that is sound, and compute the
        rest again: what the steps in flight compute for them is dropped.

        Args:
            lost: blocks that hold nothing sound; those of this step are added.
        """
        if not self.publishes_when_planned:
            return
        plan = self.plan
        for index in np.flatnonzero(self.is_current()).tolist():  # a reader stands behind those whose blocks it reads
            request = plan.table.request(int(plan.rows[index]))
            num_sound = next((i for i, block in enumerate(request.block_ids) if block in lost), None)
            if num_sound is None and request.request_id not in failed:
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
        plan, table = self.plan, self.plan.table
        self.take_back(kv, set(plan.request_ids), set())
        current = self.is_current()
        rows, start, sample = plan.rows[current], plan.num_computed[current], plan.sample[current]
        table.computed[rows] = start
        # Before the step, the rows that sample had all their tokens planned.
        table.total[rows[sample]] = self.ends[current][sample]


def give_up_sampling(request: Request) -> None:
    """What steps in flight compute and sample for the request is to be dropped."""
    table, seat = request.table, request.seat
    assert table is not None
    table.total[seat] = table.known[seat]
    table.renew(seat)


def await_tokens(plan: StepPlan, first_token_s: float) -> None:
    """The table's rows after planning: progress is noted, and a placeholder stands for each token being sampled.

    A token that ends its request by length needs none: nothing follows it.

    Args:
        first_token_s: when the step is expected to end; the time of the first tokens until it is known.
    """
    table, rows, ends = plan.table, plan.rows, plan.num_computed + plan.num_tokens
    table.computed[rows] = ends
    table.last_step[rows] = plan.step
    sampling = plan.sample & (ends + 1 < table.limit[rows])
    table.tokens[rows[sampling], ends[sampling]] = PLACEHOLDER_TOKEN_ID
    table.total[rows[sampling]] = ends[sampling] + 1
    first = rows[plan.sample & (plan.output_position == 0)]
    table.first_token_s[first] = first_token_s
