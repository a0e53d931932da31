"""The offline planner inside a simulation: it plans at once, and says so when planning would have ended.

In a server planning runs beside the engine. Here the virtual clock stands still meanwhile, and the plan reaches the
engine as much later as the device profile says for so many rows.
"""

import math
from collections.abc import Callable

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.messages import AddBatch, PlanReady, TwoEnds
from neaptide.engine.offline.dual_scan import window_densities
from neaptide.engine.offline.planned import raw
from neaptide.engine.offline.planning.blend import PoolWork, rank
from neaptide.engine.offline.planning.lengths import estimated_outputs, sampled_rows
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.plan import PLANNED_POLICIES, Pool, plan_pool
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.prefix_tree import PrefixTree
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.row_id import RowId
from neaptide.estimator.density import density_model
from neaptide.estimator.device_profile import DeviceProfile

TWO_ENDS = "ends"
"""The order by density that ``blendserve`` goes along from both ends, for an engine that chooses the end itself."""
ORDERS = (*PLANNED_POLICIES, TWO_ENDS)


class _Job:
    def __init__(self, message: AddBatch) -> None:
        self.batch_id = message.batch_id
        self.tokens = TokenFile(message.path)
        limits = np.array([params.max_tokens for params in message.params_table], np.int64)
        self.limits = np.ones(len(self.tokens), np.int64)
        self.limits[message.rows] = limits[message.params_index]
        self.waits = np.zeros(len(self.tokens), np.bool_)
        """[rows of the file]"""
        self.waits[message.rows] = True


class InlinePlanner:
    """
    Args:
        order: one of ``ORDERS``.
        scale: planning takes so many times what the profile says.
        output_tokens: true length of a row's answer. It is asked for the rows that BlendServe's warm-up would run first
            (1% of a job, at least eight); of the others the planner knows their limit and what those tell.
    """

    def __init__(
        self, order: str, profile: DeviceProfile, block_size: int, scale: float, output_tokens: Callable[[str], int]
    ) -> None:
        self._order = order
        self._profile = profile
        self._block_size = block_size
        self._scale = scale
        self._output_tokens = output_tokens
        self._jobs: dict[str, _Job] = {}
        """With rows that wait."""
        self._is_outdated = False
        """Whether rows have come since the last plan was begun."""
        self._plan: PlanReady | None = None
        self.ready_s = math.inf
        """When the plan that is being made will be ready."""

    def submitted(self, message: AddBatch, now_s: float) -> None:
        """The message's token file need not outlive this call."""
        self._jobs[message.batch_id] = _Job(message)
        self._is_outdated = True
        self._begin(now_s)

    def started(self, request_id: str) -> None:
        """A row waits no more, for it has started or ended; also one of which that is known."""
        row_id = RowId.parse(request_id)
        assert row_id is not None
        job = self._jobs.get(row_id.batch_id)
        if job is not None:
            job.waits[row_id.row] = False

    def take_ready(self, now_s: float) -> PlanReady | None:
        """The plan, if it is ready by now."""
        if now_s < self.ready_s:
            return None
        plan, self._plan, self.ready_s = self._plan, None, math.inf
        self._begin(now_s)
        return plan

    def _begin(self, now_s: float) -> None:
        """Plans anew if there is something new and no plan is being made."""
        if self._plan is not None or not self._is_outdated:
            return
        self._jobs = {batch_id: job for batch_id, job in self._jobs.items() if job.waits.any()}
        self._is_outdated = False
        if self._jobs:
            self._plan, num_rows = self._made()
            self.ready_s = now_s + self._scale * self._profile.planning.pooled_row_s * num_rows

    def _made(self) -> tuple[PlanReady, int]:
        """A plan over the rows that wait now, and their number."""
        jobs = list(self._jobs.values())
        prompts = Prompts([job.tokens for job in jobs])
        sizes = np.array([len(job.tokens) for job in jobs], np.int64)
        first = np.cumsum(sizes) - sizes
        job_of = np.repeat(np.arange(len(jobs)), sizes)
        rows = np.flatnonzero(np.concatenate([job.waits for job in jobs]))
        tree = PrefixTree.of_order(PromptOrder.of(prompts, rows), self._block_size)
        known = np.full(len(prompts), np.nan)
        for row in sampled_rows(tree, job_of).tolist():
            number = int(job_of[row])
            known[row] = self._output_tokens(str(RowId(jobs[number].batch_id, row - int(first[number]))))
        outputs = estimated_outputs(tree, known, np.concatenate([job.limits for job in jobs]))
        model = density_model(self._profile)
        lengths = prompts.lengths[tree.rows]
        work = PoolWork.of(model, prompts.lengths, outputs)
        pool = Pool(tree, lengths - tree.new_tokens(lengths), work, self._profile.kv_capacity_tokens)
        order, ends = self._ordered(pool)
        message = PlanReady([job.batch_id for job in jobs], raw(job_of[order]), raw(order - first[job_of[order]]), ends)
        return message, len(rows)

    def _ordered(self, pool: Pool) -> tuple[IntArray, TwoEnds | None]:
        if self._order != TWO_ENDS:
            (order,) = plan_pool(pool, self._order)
            return order, None
        ranked, model = rank(pool.tree, pool.work), density_model(self._profile)
        held_tokens: FloatArray = (
            pool.work.prompt_tokens[ranked.rows] - ranked.shared_tokens + (pool.work.output_tokens[ranked.rows] / 2.0)
        )
        return ranked.rows, TwoEnds(
            raw(held_tokens),
            window_densities(ranked.compute_s, ranked.memory_s),
            ranked.root_density,
            2.0 * model.parameters / model.flops_per_s,
            model.kv_bytes_per_token / model.bytes_per_s,
        )
