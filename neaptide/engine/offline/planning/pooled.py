"""Plans the lines of several jobs: from their token files to the message for the engine."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from neaptide.engine.arrays import BoolArray, FloatArray, IntArray
from neaptide.engine.messages import DualScanPlan, PlanReady
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.dual_scan import dual_scan_order, window_densities, window_sums
from neaptide.engine.offline.planned import FULL_SHARE, PROMPT_STEPS, raw
from neaptide.engine.offline.planning.blend import REPEATED_SHARE, PoolWork, Ranked, rank
from neaptide.engine.offline.planning.lengths import estimated_outputs, sampled_rows
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.plan import PromptPool, find_order
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.planning.spread import spread
from neaptide.engine.offline.planning.timetable import timetable
from neaptide.engine.offline.prefix_tree import PrefixTree
from neaptide.engine.offline.token_file import TokenFile

DUAL_SCAN = "ends"
"""Our density order, for an engine that takes rows from both ends and predicts how memory fills (``spread``)."""


@dataclass(slots=True, frozen=True)
class PooledJob:
    """Lines of one job's token file."""

    batch_id: str
    tokens: TokenFile
    waits: BoolArray
    """[lines of the file] whether the line waits."""
    limits: IntArray
    """[lines of the file] ``max_tokens`` of the waiting ones."""
    salt: str = ""
    """Salt; jobs with different salts share nothing."""
    ended: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Ended lines, which predict the answer lengths of others."""


class PooledRows:
    """Waiting lines of all jobs, sorted.

    Args:
        unit_tokens: block size of the engine's cache.
    """

    def __init__(self, jobs: Sequence[PooledJob], unit_tokens: int) -> None:
        self._batch_ids = [job.batch_id for job in jobs]
        self._limits = np.concatenate([np.zeros(0, np.int64), *(job.limits for job in jobs)])
        sizes = np.array([len(job.tokens) for job in jobs], np.int64)
        self._first = np.cumsum(sizes) - sizes
        self._job = np.repeat(np.arange(len(jobs)), sizes)
        self._prompts = Prompts([job.tokens for job in jobs], [job.salt for job in jobs])
        rows = np.flatnonzero(np.concatenate([np.zeros(0, np.bool_), *(job.waits for job in jobs)]))
        starts = zip(self._first.tolist(), jobs, strict=True)
        ended = np.concatenate([np.zeros(0, np.int64), *(start + job.ended for start, job in starts)])
        order = PromptOrder.of(self._prompts, np.concatenate((rows, ended)))
        self._told = PrefixTree.of_order(order, unit_tokens)
        """Tree of the waiting and the ended lines."""
        self.tree = PrefixTree.of_order(order.without(ended), unit_tokens) if len(ended) else self._told

    def __len__(self) -> int:
        return len(self.tree.rows)

    def sampled(self) -> list[tuple[int, int]]:
        """Job and line of the samples that predict the lengths of the others, as BlendServe's warm-up has them."""
        rows = sampled_rows(self.tree, self._job)
        return list(zip(self._job[rows].tolist(), (rows - self._first[self._job[rows]]).tolist(), strict=True))

    def plan(
        self,
        order: str,
        known: Sequence[tuple[int, int, float]],
        model: DensityModel,
        kv_tokens: int,
        so_far: Sequence[tuple[int, int, float]] = (),
        samples_first: bool = False,
    ) -> PlanReady:
        """Plans the lines.

        Args:
            order: ``ends``, or a name that ``find_order`` knows.
            known: job, line and length of known answers.
            so_far: job, line and current length of running answers.
            samples_first: jobs without known lengths run their samples first, so that a later plan knows more.
        """
        outputs = self._column(known, math.nan)
        is_known = ~np.isnan(outputs)
        outputs = estimated_outputs(self._told, outputs, self._limits, self._column(so_far, 0.0))
        lengths = self._prompts.lengths
        in_order = lengths[self.tree.rows]
        shared_tokens = in_order - self.tree.new_tokens(in_order)
        pool = PromptPool(self.tree, shared_tokens, PoolWork.of(model, lengths, outputs), kv_tokens)
        first = self._samples({job for job, *_ in (*known, *so_far)}) if samples_first else np.zeros(0, np.int64)
        rows, ends = _ordered(pool, order, model, is_known, first)
        job_of = self._job[rows]
        return PlanReady(self._batch_ids, raw(job_of), raw(rows - self._first[job_of]), ends)

    def _samples(self, told: Collection[int]) -> IntArray:
        """Samples of all jobs but those in ``told``."""
        rows = sampled_rows(self.tree, self._job)
        return rows[~np.isin(self._job[rows], list(told))]

    def _column(self, numbers: Sequence[tuple[int, int, float]], otherwise: float) -> FloatArray:
        """[rows] column with the given numbers (job, line, number), and ``otherwise`` elsewhere."""
        column = np.full(len(self._prompts), otherwise)
        for job, row, number in numbers:
            column[self._first[job] + row] = number
        return column


def _ordered(
    pool: PromptPool, order: str, model: DensityModel, is_known: BoolArray, first: IntArray
) -> tuple[IntArray, DualScanPlan | None]:
    """The order and its dual-scan data.

    Args:
        first: rows before all others.
    """
    if order == DUAL_SCAN:
        ranked = rank(pool.tree, pool.work, repeated_share=REPEATED_SHARE)
        ranked = spread(ranked, pool.tree, pool.work, pool.kv_tokens)
    else:
        found = find_order(order)(pool, pool.tree.rows)
        if not isinstance(found, Ranked):
            return found, None
        ranked = found
    ranked = ranked.with_first(first)
    own_tokens = pool.work.prompt_tokens[ranked.rows] - ranked.shared_tokens
    outputs = pool.work.output_tokens[ranked.rows]
    held_tokens: FloatArray = own_tokens + outputs / 2.0
    scanned = dual_scan_order(ranked.compute_s, ranked.memory_s, held_tokens, outputs, pool.kv_tokens)
    scanned = np.concatenate((np.arange(len(first)), scanned[scanned >= len(first)]))
    turns = np.empty(len(scanned), np.int64)
    turns[scanned] = np.arange(len(scanned))
    token_s, kv_token_s = 2.0 * model.parameters / model.flops_per_s, model.kv_bytes_per_token / model.bytes_per_s
    starts = None
    if order == DUAL_SCAN:
        room = PoolRoom(held_tokens * outputs, own_tokens, ranked.root_density * kv_token_s / token_s, pool.kv_tokens)
        starts = timetable(ranked, pool.work, is_known, room.beside)
    return ranked.rows, DualScanPlan(
        raw(held_tokens),
        raw(outputs),
        window_densities(ranked.compute_s, ranked.memory_s),
        window_sums(ranked.memory_s),
        ranked.root_density,
        token_s,
        kv_token_s,
        raw(turns),
        *((b"", 0) if starts is None else (raw(starts), pool.kv_tokens)),
        len(first),
        model.tile_tokens,
    )


@dataclass(slots=True, frozen=True)
class PoolRoom:
    """Memory of the sparse end while the other end runs."""

    held_tokens: FloatArray
    """[order] sum of held tokens over each row's steps."""
    own_tokens: IntArray
    """[order] tokens of the prompts."""
    tokens_per_read: float
    """Mean number of prompt tokens for each token that a step reads."""
    kv_tokens: int

    def beside(self, first: int) -> float:
        """Tokens for the rows from this rank on: the other rows hold their prompts, and their answers while they
        run."""
        memory = FULL_SHARE * self.kv_tokens
        of_others = float(self.held_tokens[:first].sum() / self.held_tokens[first:].sum())
        prompt_tokens = PROMPT_STEPS * self.tokens_per_read * self.kv_tokens
        largest = float(self.own_tokens[:first].max(initial=0))
        return min((memory - prompt_tokens) / (1.0 + of_others), memory - largest)
