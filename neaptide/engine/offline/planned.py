"""An order that was planned over the rows that wait, and how the pool goes along it.

Whose turn it is stays with ``Turns``, which leave open all owners of equal laxity as long as none is far ahead; the
plan chooses among what these have (ADR 0015).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.messages import DualScanPlan, PlanReady
from neaptide.engine.offline.dual_scan import MemoryShares, split_memory, window_rows, window_sums
from neaptide.engine.offline.lanes import JobLane, Lane, LanePlace
from neaptide.engine.offline.planning.timetable import Timetable
from neaptide.engine.offline.row_source import UNPLANNED, PlannedRows
from neaptide.engine.offline.turns import Look
from neaptide.engine.request import Request

STEADY_SHARE = 0.75
"""Share of the memory that answers of the right end hold on average, where it is not foreseen: they grow, and the other
end needs some."""
FULL_SHARE = 0.97
"""Share of the memory that both ends may hold where it is foreseen: blocks that are not full have an empty rest."""
PROMPT_STEPS = 2.0
"""Steps for which a prompt of the dense end holds its blocks before its first output: it has all of them from its
first chunk on, and shares its steps with its neighbours."""
RAW = "<i4"
"""Numbers in a message."""
FIRST_USE = 1
"""Use of the plan's first row: preempted requests come before."""


def raw(numbers: npt.ArrayLike) -> bytes:
    """As a message has them."""
    return np.asarray(numbers).astype(RAW).tobytes()


@dataclass(frozen=True)
class Ends:
    """Both ends of an order that is sorted by density."""

    held_tokens: FloatArray
    """[order]"""
    lasting_steps: FloatArray
    """[order] tokens of the answers."""
    densities: list[float]
    """Densities of windows."""
    window_memory_s: list[float]
    """Memory time of each window."""
    root_density: float
    token_s: float
    kv_token_s: float
    turns: IntArray
    """[order] in which the two ends are expected to hand them out."""
    starts: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[order] of a timetable (``planning/timetable.py``); empty without one."""
    kv_tokens: int = 0
    """Size of the memory that it is for."""
    num_first: int = 0
    """Rows at the front that come before either end."""
    tile_tokens: int = 1
    """Steps should have multiples of so many tokens."""

    @classmethod
    def of(cls, message: DualScanPlan) -> "Ends":
        held, lasting = (
            np.frombuffer(one, RAW).astype(np.float64) for one in (message.held_tokens, message.lasting_steps)
        )
        turns = np.frombuffer(message.turns, RAW).astype(np.int64)
        root_density, token_s, kv_token_s = message.root_density, message.token_s, message.kv_token_s
        windows, starts = (message.densities, message.memory_s), np.frombuffer(message.starts, RAW).astype(np.int64)
        prices = root_density, token_s, kv_token_s
        others = message.kv_tokens, message.num_first, message.tile_tokens
        return cls(held, lasting, *windows, *prices, turns, starts, *others)

    def density(self, rank: int) -> float:
        return self.densities[rank // window_rows(len(self.held_tokens))]

    def timetable(self) -> Timetable | None:
        """From its first step on."""
        if not len(self.starts):
            return None
        work_s = np.diff(np.stack(self._sums, axis=1), axis=0)[self.starts >= 0]
        return Timetable(self.starts, self.lasting_steps, self.kv_tokens, work_s)

    @cached_property
    def memory_s(self) -> FloatArray:
        """[order]"""
        found: FloatArray = self.lasting_steps * self.held_tokens * self.kv_token_s
        return found

    def held_density(self, rank: int) -> float:
        """The same by what rows hold of their own: what they share is held once."""
        return float(self._held_densities[rank // window_rows(len(self.held_tokens))])

    def paced(self, density: float, kv_tokens: int) -> float:
        """Prompt tokens of a step that fills the memory and has this density: they are held before they have put out
        anything."""
        return density * self.kv_token_s * kv_tokens / self.token_s

    def largest_prompt(self, first: int) -> float:
        """Tokens of the longest prompt of the dense rows from this rank on. All that is dense waits while it does."""
        return float(self._largest_prompts[first])

    def work_between(self, first: int, last: int) -> tuple[float, float, float]:
        """Compute and memory time of the rows from one rank to the other, and of the latter what decodes read."""
        compute_s, memory_s, decodes_s = (float(sums[last + 1] - sums[first]) for sums in self._sums)
        return compute_s, memory_s, decodes_s

    def longest_steps(self, last: int) -> float:
        """Longest of the answers up to this rank."""
        return float(self._longest_steps[last])

    @cached_property
    def _held_densities(self) -> FloatArray:
        """[windows]"""
        held_s = np.array(window_sums(self.memory_s))
        found: FloatArray = np.array(self.densities) * np.array(self.window_memory_s) / np.maximum(held_s, 1e-12)
        return found

    @cached_property
    def _largest_prompts(self) -> FloatArray:
        """[order]"""
        prompts = np.where(self._row_densities < self.root_density, 0.0, self.held_tokens - self.lasting_steps / 2.0)
        found: FloatArray = np.maximum.accumulate(prompts[::-1])[::-1]
        return found

    @cached_property
    def _longest_steps(self) -> FloatArray:
        """[order]"""
        found: FloatArray = np.maximum.accumulate(self.lasting_steps)
        return found

    @cached_property
    def _row_densities(self) -> FloatArray:
        return self._of_rows(self.densities)

    def _of_rows(self, windows: npt.ArrayLike) -> FloatArray:
        """[order] of every row's window."""
        count = len(self.held_tokens)
        found: FloatArray = np.repeat(np.asarray(windows, np.float64), window_rows(count))[:count]
        return found

    def _part_of_window(self, weights: FloatArray) -> FloatArray:
        """[order] of every row, equal ones, but by weight in windows with rows of a timetable."""
        count = len(weights)
        window = np.arange(count) // window_rows(count)
        if len(self.starts):
            has_start = np.bincount(window, self.starts >= 0) > 0
            weights = np.where(has_start[window], weights, 1.0)
        else:
            weights = np.ones(count)
        found: FloatArray = weights / np.bincount(window, weights)[window]
        return found

    @cached_property
    def _sums(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """[order + 1] of compute, of memory, of what decodes read; every row has its part of its window's. A row reads
        what it shares as well, so what it holds of its own does not tell it; but in windows with rows of a timetable,
        which share next to nothing, it does. The first token of an answer comes with the prompt, and no decode reads
        for it."""
        own_s = np.maximum(self.memory_s, 1e-12)
        memory_s = self._of_rows(self.window_memory_s)
        compute_s = self._row_densities * memory_s * self._part_of_window(self.held_tokens + self.lasting_steps / 2.0)
        memory_s *= self._part_of_window(own_s)
        own_decodes_s = own_s * (1.0 - 1.0 / np.maximum(self.lasting_steps, 1.0))
        decodes_s = memory_s * self._of_rows(np.array(window_sums(own_decodes_s)) / np.array(window_sums(own_s)))
        first, second, third = (
            np.concatenate(([0.0], np.cumsum(column))) for column in (compute_s, memory_s, decodes_s)
        )
        return first, second, third


@dataclass(slots=True, frozen=True)
class PlannedOrder:
    batch_ids: list[str]
    batches: IntArray
    """[order] index into ``batch_ids``."""
    rows: IntArray
    """[order]"""
    ends: Ends | None

    @classmethod
    def of(cls, message: PlanReady) -> "PlannedOrder":
        batches, rows = (np.frombuffer(raw, RAW).astype(np.int64) for raw in (message.batches, message.rows))
        return cls(message.batch_ids, batches, rows, None if message.ends is None else Ends.of(message.ends))

    def of_jobs(self) -> Iterator[tuple[str, "PlannedRows"]]:
        """Every job with its rows."""
        uses = np.arange(len(self.rows)) if self.ends is None else self.ends.turns
        # Not a look at all rows for each of some thousand jobs: a step of the engine waits. Rows may be of no job (-1).
        by_job = np.argsort(self.batches, kind="stable")
        bounds = np.searchsorted(self.batches[by_job], np.arange(len(self.batch_ids) + 1)).tolist()
        for batch_id, first, end in zip(self.batch_ids, bounds[:-1], bounds[1:], strict=True):
            ranks = by_job[first:end]
            yield batch_id, PlannedRows(self.rows[ranks], ranks, FIRST_USE + uses[ranks])


class Scan:
    """Which end of the order is next.

    Args:
        target_density: that the requests at work together should have; None goes for that of the whole order.
        kv_tokens: of the memory that offline work may hold; 0 does not keep rows of the right end apart.
        looks_ahead: rows of the right end start when what all of them will hold fits, not as far apart as a steady
            state has them: memory fills sooner, and stays full.
        timetable: when they start, in place of either, while it is kept.
    """

    def __init__(
        self,
        ends: Ends,
        shares: MemoryShares,
        target_density: float | None = None,
        kv_tokens: int = 0,
        looks_ahead: bool = False,
        timetable: Timetable | None = None,
    ) -> None:
        self.timetable = timetable
        self._ends = ends
        self._kv_tokens = kv_tokens
        self._looks_ahead = looks_ahead
        self._refused = UNPLANNED
        """The rank of the row that did not fit: in one look memory only fills."""
        self._shares = shares
        self._target = target_density
        self._looked_at: dict[str, tuple[bool, float, float, float, float]] = {}
        """By id, of rows: what ``MemoryShares.start`` wants."""

    def is_right_next(self, left_rank: int, right_rank: int) -> bool:
        if left_rank < self._ends.num_first:
            return False
        left, right = self._ends.density(left_rank), self._ends.density(right_rank)
        target = self._ends.root_density if self._target is None else self._target
        if not self._looks_ahead:
            return self._shares.is_right_next(left, right, target)
        memory = FULL_SHARE * self._kv_tokens
        parts = split_memory(memory, self._ends.held_density(left_rank), right, target)
        prompt_tokens = PROMPT_STEPS * self._ends.paced(target, self._kv_tokens)
        left_tokens = max(parts.left + prompt_tokens, self._ends.largest_prompt(left_rank))
        return self._has_room(right_rank, memory - left_tokens)

    def due(self) -> Iterator[int]:
        """Ranks of the timetable's rows that should start now, for which this look may have been before."""
        return self.timetable.due(self._shares.is_right_idle) if self.timetable is not None else iter(())

    def is_open(self, rank: int) -> bool:
        """Whether the row may be taken before any other, and need not wait for its start."""
        return rank == UNPLANNED or self.timetable is None or not self.timetable.has(rank)

    def _has_room(self, rank: int, part_tokens: float) -> bool:
        """Whether this row of the right end fits into the end's part of the memory until it ends."""
        if rank == self._refused:
            return False
        held_tokens, lasting_steps = float(self._ends.held_tokens[rank]), float(self._ends.lasting_steps[rank])
        if part_tokens > 0.0 and self._shares.has_room(held_tokens, lasting_steps, part_tokens):
            return True
        self._refused = rank
        return False

    def take(self, request_id: str, is_right: bool, rank: int) -> None:
        """In this look."""
        held_tokens, lasting_steps = float(self._ends.held_tokens[rank]), float(self._ends.lasting_steps[rank])
        apart_steps = 0.0
        if is_right and self._kv_tokens:
            apart_steps = lasting_steps * held_tokens / (STEADY_SHARE * self._kv_tokens)
        start = is_right, held_tokens, lasting_steps, float(self._ends.memory_s[rank]), apart_steps
        self._looked_at[request_id] = start
        self._shares.start(request_id, *start)

    def started(self, request_id: str, shares: MemoryShares) -> None:
        """A row is handed out: if this look has come to it, it counts for the end that it was at."""
        if request_id in self._looked_at:
            shares.start(request_id, *self._looked_at[request_id])


class _Heads:
    """What a lane has at both ends, as one look takes it away."""

    def __init__(self, lane: Lane, materialized: list[Request]) -> None:
        self._lane, self._looked_at = lane, materialized
        self._places: Iterator[LanePlace] = lane.places() if isinstance(lane, JobLane) else iter(())
        self._from_back: Iterator[LanePlace] = lane.planned_from_back() if isinstance(lane, JobLane) else iter(())
        self._others = iter(()) if isinstance(lane, JobLane) else lane.waiting(materialized)
        self._taken = set[LanePlace]()
        self.first = self._next(self._places)
        self._last: LanePlace | None = None
        self.flex = next(self._others, None)

    @property
    def is_empty(self) -> bool:
        return self.first is None and self.flex is None

    @property
    def rank(self) -> int:
        """Rank of the first row."""
        return UNPLANNED if self.first is None else self.first.rank

    @property
    def last_rank(self) -> int:
        """Rank of the last row of the plan, which has some."""
        if self._last is None or self._last in self._taken:
            self._last = self._next(self._from_back)
        assert self._last is not None
        return self._last.rank

    def find(self, rank: int) -> bool:
        """Whether the row of this rank is here; then it is taken in place of the last one."""
        place = self._lane.planned_at(rank) if isinstance(self._lane, JobLane) else None
        if place is None or place in self._taken:
            return False
        self._last = place
        return True

    def take(self, is_right: bool = False) -> Request:
        """Takes the last row of the plan, whose rank was asked for, or the first request."""
        if self.flex is not None:
            request, self.flex = self.flex, next(self._others, None)
            return request
        place = self._last if is_right else self.first
        assert place is not None
        self._taken.add(place)
        if self.first in self._taken:
            self.first = self._next(self._places)
        return place.request(self._looked_at)

    def _next(self, places: Iterator[LanePlace]) -> LanePlace | None:
        return next((place for place in places if place not in self._taken), None)


def in_planned_turn(
    lanes: Sequence[Lane], look: Look, scan: Scan | None, materialized: list[Request]
) -> Iterator[Request]:
    """What waits in the lanes, in the order of the plan where turns leave it open; requests of ``flex``, for which a
    caller waits, and rows that no plan knows as turns have them.

    Args:
        look, scan: to look ahead with: they are changed.
    """
    heads = {lane: found for lane in lanes if not (found := _Heads(lane, materialized)).is_empty}
    while heads:
        lane, is_right = _next_lane(heads, look, scan)
        if lane is None:
            return
        rank = heads[lane].last_rank if is_right else heads[lane].rank
        request = heads[lane].take(is_right)
        if scan is not None and rank != UNPLANNED:
            scan.take(request.request_id, is_right, rank)
        yield request
        look.took(lane, request)
        if heads[lane].is_empty:
            del heads[lane]
            look.drop(lane)


def _next_lane(heads: dict[Lane, _Heads], look: Look, scan: Scan | None) -> tuple[Lane | None, bool]:
    """Whose turn it is, and whether its last row of the plan is meant, or the one that was found; None where all that
    is left waits for its start."""
    planned = [lane for lane in look.open_to_a_plan(list(heads)) if heads[lane].rank != UNPLANNED]
    if not planned:
        return min(heads, key=look.key), False
    left = chosen = min(planned, key=lambda lane: heads[lane].rank)
    is_right = False
    if scan is not None and scan.timetable is not None:
        due = next((lane for rank in scan.due() for lane in planned if heads[lane].find(rank)), None)
        if due is None and not scan.is_open(heads[left].rank):
            others = [lane for lane in heads if heads[lane].rank == UNPLANNED]
            return min(others, key=look.key, default=None), False
        chosen, is_right = due or left, due is not None
    elif scan is not None:
        right = max(planned, key=lambda lane: heads[lane].last_rank)
        is_right = scan.is_right_next(heads[left].rank, heads[right].last_rank)
        chosen = right if is_right else left
    flex = [lane for lane in heads if not lane.is_job]
    first = min([*flex, chosen], key=look.key)
    return first, is_right and first is chosen
