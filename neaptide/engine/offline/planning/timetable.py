"""When rows of the sparse end start, where it is known how long each of them lasts (ours).

An answer holds one token more with every step and gives all of them back at its end. Read backwards it takes all of its
room at once and lets go of it step by step. Packed from the end of the run, the longest first, each in the step in
which it fits, answers keep memory full until the last step; the shortest ones start first, for which it fills soonest.
Started in the order in which they fit, without a timetable, memory runs dry over more than half of the longest answer.

A timetable is only as good as its lengths, and as the memory that it was made for: where either is not as planned it is
worse than none (ADR 0026). So it is made of known lengths only, and given up for good once it is not kept.
"""

from collections.abc import Callable, Iterator

import numpy as np

from neaptide.engine.arrays import BoolArray, FloatArray, IntArray
from neaptide.engine.offline.planning.blend import PoolWork, Ranked
from neaptide.engine.offline.planning.spread import MIN_ROWS

OPEN = -1
"""In place of a start: the row has none."""
MAX_ROWS = 4096
"""Most rows of a timetable. Where there are more, each answer is small beside the memory, or they take many times the
longest answer; either way little is lost at the two ends of the run."""
MIN_SHARE = 0.95
"""Least share of what the sparse end reads in rows with a start: others would take their room."""
ROOM_SHARE = 0.98
"""Share of the room that is laid out: a timetable without slack is not kept."""
LATE_SHARE = 0.02
"""Share of the longest answer: a row that starts later than that breaks the timetable."""


def packed_starts(prompt_tokens: FloatArray, lasting_steps: FloatArray, room_tokens: float) -> FloatArray:
    """[rows] The step in which each starts, from 0 on, so that all together never hold more than the room.

    Args:
        prompt_tokens: [rows] that each holds from its start on; one more with every step.
        lasting_steps: [rows] until it ends.
        room_tokens: no row alone may need more.
    """
    ends, now = np.zeros(len(lasting_steps)), 0.0  # steps before the last one, as are ``now`` and ``starts``
    prompts, starts = np.zeros(0), np.zeros(0)
    for row in np.argsort(-lasting_steps, kind="stable").tolist():
        needed = float(prompt_tokens[row] + lasting_steps[row])
        while True:
            runs = starts > now
            prompts, starts = prompts[runs], starts[runs]
            missing = needed + float((prompts + starts - now).sum()) - room_tokens
            if missing <= 0.0 or not len(starts):
                break
            now += min(float(np.ceil(missing / len(starts))), float(starts.min()) - now)
        ends[row] = now
        prompts, starts = np.append(prompts, prompt_tokens[row]), np.append(starts, now + lasting_steps[row])
    begun = ends + lasting_steps
    found: FloatArray = begun.max(initial=0.0) - begun
    return found


def timetable(
    ranked: Ranked, work: PoolWork, is_known: BoolArray, room_tokens: Callable[[int], float]
) -> IntArray | None:
    """[order] The step of every start, ``OPEN`` for rows without; None where there can be no timetable.

    It has the sparse rows at the very end, of one piece: to change places costs them no sharing.

    Args:
        ranked: whose sparse end was ``spread``.
        is_known: [rows of the pool] whether the answer's length is no estimate.
        room_tokens: what rows from this rank on may hold.
    """
    count = len(ranked.rows)
    is_sparse = ranked.compute_s < ranked.root_density * ranked.memory_s
    others = np.flatnonzero(~is_sparse | (ranked.piece != ranked.piece[-1])) if count else np.zeros(0, np.int64)
    first = int(others[-1]) + 1 if len(others) else 0
    rows = ranked.rows[first:]
    if not MIN_ROWS <= len(rows) <= MAX_ROWS or not is_known[rows].all():
        return None
    if ranked.memory_s[first:].sum() < MIN_SHARE * ranked.memory_s[is_sparse].sum():
        return None
    prompt_tokens = (work.prompt_tokens[rows] - ranked.shared_tokens[first:]).astype(np.float64)
    lasting_steps, room = work.output_tokens[rows], ROOM_SHARE * room_tokens(first)
    if float((prompt_tokens + lasting_steps).max()) > room:
        return None
    found = np.full(count, OPEN)
    found[first:] = packed_starts(prompt_tokens, lasting_steps, room)
    return found


class Timetable:
    """Starts that are kept, as steps go by.

    Args:
        starts: [order] ``OPEN`` for rows without, which all come before those with one.
        lasting_steps: [order]
        kv_tokens: of the memory that it was made for.
        work_s: [rows with a start, 3] compute and memory time of each, and of the latter what decodes read.
    """

    def __init__(self, starts: IntArray, lasting_steps: FloatArray, kv_tokens: int, work_s: FloatArray) -> None:
        by_start = np.argsort(starts, kind="stable")
        self._ranks: list[int] = by_start[starts[by_start] != OPEN].tolist()
        self._starts = starts
        self.first_rank = len(starts) - len(self._ranks)
        in_turn_s = work_s[np.array(self._ranks, np.int64) - self.first_rank]
        self._work_left_s = np.vstack((np.cumsum(in_turn_s[::-1], axis=0)[::-1], np.zeros(3)))
        """[rows with a start + 1, 3] of each and all after it."""
        self._kv_tokens = kv_tokens
        self._late_steps = LATE_SHARE * float(lasting_steps[self._ranks].max(initial=0.0))
        self._end = float((starts + lasting_steps)[self._ranks].max(initial=0.0))
        self._next = 0
        """Into the ranks: all before it wait no more."""
        self._step = -1

    def begin_step(self, waits: Callable[[int], bool], kv_tokens: int) -> bool:
        """Whether the timetable is still kept; not asked again once it is not.

        Args:
            waits: whether the row of this rank does.
            kv_tokens: that offline work may hold now.
        """
        self._step += 1
        while self._next < len(self._ranks) and not waits(self._ranks[self._next]):
            self._next += 1
        if self._next == len(self._ranks) and self._step >= self._end:
            return False
        late = self._next < len(self._ranks) and self._step - self._starts[self._ranks[self._next]] > self._late_steps
        return kv_tokens >= self._kv_tokens and not late

    @property
    def work_left(self) -> tuple[float, float, float]:
        """Compute and memory time of the rows that wait, and of the latter what decodes read."""
        compute_s, memory_s, decodes_s = self._work_left_s[self._next].tolist()
        return compute_s, memory_s, decodes_s

    @property
    def steps_left(self) -> float:
        """Until the last row ends."""
        return self._end - self._step

    def has(self, rank: int) -> bool:
        """Whether the row has a start."""
        return bool(self._starts[rank] != OPEN)

    def due(self, is_idle: bool) -> Iterator[int]:
        """Ranks of rows whose step has come; some of them may have started since it began.

        Args:
            is_idle: no row of the timetable runs: the next one is due whatever its step.
        """
        for rank in self._ranks[self._next :]:
            if self._starts[rank] > self._step and not is_idle:
                return
            yield rank
