"""A server's offline planner inside a simulation: it knows an answer's length only after the answer has ended."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from neaptide.engine.messages import PlanReady
from neaptide.engine.offline.planning.occasions import PERIOD_S, Occasions
from neaptide.engine.offline.planning.pooled import PooledJob, PooledRows
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId
from neaptide.estimator.density import density_model
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.simulation.pools.inline_planner import InlinePlanner


class ServedPlanner(InlinePlanner):
    """Plans on the server's ``Occasions`` with the server's knowledge: ended answers, and the progress of
    running ones.

    Args:
        running: offline requests that have started.
    """

    def __init__(
        self,
        order: str,
        profile: DeviceProfile,
        block_size: int,
        scale: float,
        output_tokens: Callable[[str], int],
        running: Callable[[], Iterable[Request]],
    ) -> None:
        super().__init__(order, profile, block_size, scale, output_tokens)
        self._running = running
        self._occasions = Occasions()
        self._lengths: dict[str, dict[int, float]] = {}
        """Lengths of answers that have ended, by job and row."""
        self._next_s = -math.inf
        """Earliest time of the next plan."""

    def ended(self, request_id: str) -> None:
        super().ended(request_id)
        row_id = RowId.parse(request_id)
        assert row_id is not None
        self._lengths.setdefault(row_id.batch_id, {})[row_id.row] = float(self._output_tokens(request_id))
        self._occasions.ended(1)

    def take_ready(self, now_s: float) -> PlanReady | None:
        plan = super().take_ready(now_s)
        if plan is None:
            self._begin(now_s)
        return plan

    def _note_grown(self, num_rows: int) -> None:
        self._occasions.grown(num_rows)

    def _is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s and self._occasions.is_due(now_s)

    def _note_begun(self, now_s: float) -> None:
        self._occasions.begin(now_s)
        self._next_s = now_s + PERIOD_S

    def _made(self) -> tuple[PlanReady, int]:
        running = self._tokens_so_far()
        jobs: list[PooledJob] = []
        known, so_far = list[tuple[int, int, float]](), list[tuple[int, int, float]]()
        for number, job in enumerate(self._jobs.values()):
            started, ended = running.get(job.batch_id, {}), self._lengths.get(job.batch_id, {})
            waits = job.waits.copy()
            waits[list(started)] = True  # a server plans all rows that have not ended
            jobs.append(replace(job, waits=waits, ended=np.array(list(ended), np.int64)))
            so_far += [(number, row, float(num_tokens)) for row, num_tokens in started.items()]
            known += [(number, *one) for one in ended.items()]
        pooled = PooledRows(jobs, self._block_size)
        self._occasions.planned(len(pooled))
        model, kv_tokens = density_model(self._profile), self._profile.kv_capacity_tokens
        return pooled.plan(self._order, known, model, kv_tokens, so_far, samples_first=True), len(pooled)

    def _tokens_so_far(self) -> dict[str, dict[int, int]]:
        """Tokens of answers that have not ended, by job and row."""
        found: dict[str, dict[int, int]] = {}
        for request in self._running():
            row_id = RowId.parse(request.request_id)
            if row_id is not None:
                found.setdefault(row_id.batch_id, {})[row_id.row] = request.num_output_tokens
        return found
