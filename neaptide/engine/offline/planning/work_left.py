"""What a plan that is followed from both ends still has to do."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from neaptide.engine.offline.dual_scan import MemoryShares
from neaptide.engine.offline.planned import Ends
from neaptide.engine.offline.planning.timetable import Timetable


class WorkLeft(NamedTuple):
    """What a plan still has to do."""

    density: float
    held_tokens: float
    """Tokens held, summed over steps until all that waits and runs has ended."""
    read_tokens: float
    """Tokens of these that decodes read: all but a prompt's in its own step."""
    longest_steps: float
    """Least number of steps until then."""
    planned_steps: float = 0.0
    """Number of steps of a timetable, while it is kept."""


class StepMeans(NamedTuple):
    """Tokens of a step."""

    held: float
    read: float
    """By decodes."""


def work_left(
    ends: Ends, timetable: Timetable | None, shares: MemoryShares, spans: Sequence[tuple[int, int]]
) -> WorkLeft:
    """Work of the rows that wait, with what those that run have still to read; the density of the whole plan where none
    waits.

    Args:
        timetable: its rows leave in another order than that of the ranks.
        spans: first and last rank of each job's rows that wait.
    """
    tokens, longest_steps = shares.left(ends.kv_token_s)
    if not spans:
        return WorkLeft(ends.root_density, tokens, tokens, longest_steps)
    first, last = min(first for first, _ in spans), max(last for _, last in spans)
    end = last if timetable is None else min(last, timetable.first_rank - 1)
    parts = [timetable.work_left] if timetable is not None else []
    parts += [ends.work_between(first, end)] if end >= first else []
    compute_s, memory_s, decodes_s = map(sum, zip(*parts, strict=True))
    held_tokens, read_tokens = (tokens + seconds / ends.kv_token_s for seconds in (memory_s, decodes_s))
    density = compute_s / (ends.kv_token_s * held_tokens) if held_tokens > 0.0 else math.inf
    longest_steps = max(longest_steps, ends.longest_steps(last))
    planned_steps = 0.0 if timetable is None else timetable.steps_left
    return WorkLeft(density, held_tokens, read_tokens, longest_steps, planned_steps)
