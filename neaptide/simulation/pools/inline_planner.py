"""The offline planner inside a simulation: it plans at once and delivers the plan when planning would have ended.

In a server, planning runs in parallel to the engine. Here the virtual clock stands still meanwhile. The plan reaches
the engine after the time that the device profile gives for this number of rows.
"""

import math
from collections.abc import Callable

import numpy as np

from neaptide.engine.messages import AddBatch, PlanReady
from neaptide.engine.offline.planning.pooled import PooledJob, PooledRows
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.row_id import RowId
from neaptide.estimator.density import density_model
from neaptide.estimator.device_profile import DeviceProfile


def _job(message: AddBatch) -> PooledJob:
    tokens = TokenFile(message.path)
    limits = np.array([params.max_tokens for params in message.params_table], np.int64)
    of_row, waits = np.ones(len(tokens), np.int64), np.zeros(len(tokens), np.bool_)
    of_row[message.rows], waits[message.rows] = limits[message.params_index], True
    return PooledJob(message.batch_id, tokens, waits, of_row)


def _fixed(message: AddBatch) -> dict[int, float]:
    """Rows whose length is exactly the requested one."""
    lengths = [float(params.max_tokens) if params.ignore_eos else math.nan for params in message.params_table]
    of_rows = zip(message.rows, message.params_index, strict=True)
    return {row: lengths[index] for row, index in of_rows if not math.isnan(lengths[index])}


class InlinePlanner:
    """Plans the offline pool in virtual time.

    Args:
        order: one of ``ORDERS``.
        scale: factor on the profile's planning time.
        output_tokens: true length of a row's answer, queried for the rows that BlendServe's warm-up would run first (1%
            of a job, at least eight). For the others the planner knows their limit and what those lengths imply. With
            ``ignore_eos`` it knows the exact length.
    """

    def __init__(
        self, order: str, profile: DeviceProfile, block_size: int, scale: float, output_tokens: Callable[[str], int]
    ) -> None:
        self._order = order
        self._profile = profile
        self._block_size = block_size
        self._scale = scale
        self._output_tokens = output_tokens
        self._jobs: dict[str, PooledJob] = {}
        """Jobs with waiting rows."""
        self._fixed: dict[str, dict[int, float]] = {}
        """Requested exact lengths, by job and row."""
        self._is_outdated = False
        """Whether rows have arrived since the last plan was begun."""
        self._plan: PlanReady | None = None
        self.ready_s = math.inf
        """Time when the current plan will be ready."""

    def submitted(self, message: AddBatch, now_s: float) -> None:
        """Adds a job. The message's token file need not outlive this call."""
        self._jobs[message.batch_id], self._fixed[message.batch_id] = _job(message), _fixed(message)
        self._note_grown(len(message.rows))
        self._begin(now_s)

    def started(self, request_id: str) -> None:
        """Records that a row has started or ended. Repeated calls are allowed."""
        row_id = RowId.parse(request_id)
        assert row_id is not None
        job = self._jobs.get(row_id.batch_id)
        if job is not None:
            job.waits[row_id.row] = False

    def ended(self, request_id: str) -> None:
        """Records that a row has ended."""
        self.started(request_id)

    def take_ready(self, now_s: float) -> PlanReady | None:
        """The plan, if it is ready."""
        if now_s < self.ready_s:
            return None
        plan, self._plan, self.ready_s = self._plan, None, math.inf
        self._begin(now_s)
        return plan

    def _begin(self, now_s: float) -> None:
        """Begins a plan if there is something new and no plan is in progress."""
        if self._plan is not None or not self._is_due(now_s):
            return
        self._jobs = {batch_id: job for batch_id, job in self._jobs.items() if job.waits.any()}
        self._note_begun(now_s)
        if self._jobs:
            self._plan, num_rows = self._made()
            self.ready_s = now_s + self._scale * self._profile.planning.pooled_row_s * num_rows

    def _note_grown(self, num_rows: int) -> None:
        self._is_outdated = True

    def _is_due(self, now_s: float) -> bool:
        return self._is_outdated

    def _note_begun(self, now_s: float) -> None:
        self._is_outdated = False

    def _made(self) -> tuple[PlanReady, int]:
        """A plan over the rows that wait now, and their number."""
        jobs = list(self._jobs.values())
        pooled = PooledRows(jobs, self._block_size)
        known = [
            (job, row, float(self._output_tokens(str(RowId(jobs[job].batch_id, row))))) for job, row in pooled.sampled()
        ]
        known += [(number, *one) for number, job in enumerate(jobs) for one in self._fixed[job.batch_id].items()]
        model = density_model(self._profile)
        return pooled.plan(self._order, known, model, self._profile.kv_capacity_tokens), len(pooled)
