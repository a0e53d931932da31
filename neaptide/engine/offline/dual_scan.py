"""Dual scan: shares memory between the two ends of a list sorted by compute density.

BlendServe (ASPLOS'26), section 5.3 and Algorithm 3: the scanner takes compute-bound requests from the left and
memory-bound ones from the right. So the batch has the density of the whole set.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Self

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray


class Split(NamedTuple):
    """One quantity for each end."""

    left: float
    right: float


def split_memory(memory: float, left_density: float, right_density: float, root_density: float) -> Split:
    """Splits memory between the ends: ``M_L + M_R = M`` and ``M_L rho_L + M_R rho_R = M rho_root``.

    ``M_L = M (rho_root - rho_R) / (rho_L - rho_R)``, clamped to 0 and M. A root density outside of both ends cannot be
    met; the nearer end then takes all. With equal densities each end gets half.

    Args:
        memory: in any unit, which the parts have as well.
        left_density: density of the compute-bound end.
        right_density: density of the memory-bound end.
        root_density: density of the whole set.
    """
    if left_density == right_density:
        return Split(memory / 2.0, memory / 2.0)
    share = (root_density - right_density) / (left_density - right_density)
    left = memory * min(max(share, 0.0), 1.0)
    return Split(left, memory - left)


class ReadingLeft(NamedTuple):
    """Reads that remain until all running requests have ended."""

    tokens: float
    longest_steps: float
    """Steps until the last running request ends."""


OVERDUE = 0.25
"""Expected rest of an answer that is longer than expected, as a fraction of its age."""


class MemoryAhead:
    """Predicts the memory of running answers, which grow by one token per step until they end.

    Memory is fullest just before an answer ends, so there are only as many peaks to check as answers. The average of a
    steady state tells neither how much more may start while memory fills, nor that answers that start together are
    longest together. Running answers are expected to be wrong by the factor of those that have ended, so a plan that
    misjudges all of them corrects itself.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._rows: FloatArray = np.zeros((3, 0))
        """Start step, tokens held at the start, and expected steps of each answer."""
        self._lasted = self._expected = 0.0
        """Actual and expected steps of all ended answers."""

    def __len__(self) -> int:
        return len(self._ids)

    def copy(self) -> Self:
        """A copy for looking ahead."""
        other = type(self)()
        other._ids, other._rows = list(self._ids), self._rows
        other._lasted, other._expected = self._lasted, self._expected
        return other

    def start(self, request_id: str, step: int, prompt_tokens: float, lasting_steps: float) -> None:
        self._ids.append(request_id)
        self._rows = np.append(self._rows, [[step], [prompt_tokens], [lasting_steps]], axis=1)

    def end(self, request_id: str, step: int) -> None:
        """Ends an answer; ignores one that was never started."""
        if request_id in self._ids:
            index = self._ids.index(request_id)
            del self._ids[index]
            self._lasted += step - self._rows[0, index]
            self._expected += self._rows[2, index]
            self._rows = np.delete(self._rows, index, axis=1)

    def expect(self, lasting_steps: Mapping[str, float]) -> None:
        """Sets new expected steps by id, and forgets the error so far: the new estimates know the ended answers."""
        self._rows = self._rows.copy()  # A copy for looking ahead may share the array.
        for index, request_id in enumerate(self._ids):
            self._rows[2, index] = lasting_steps.get(request_id, self._rows[2, index])
        self._lasted = self._expected = 0.0

    def peak_tokens(self, step: int, prompt_tokens: float, lasting_steps: float) -> float:
        """Largest total of tokens while one more answer, started in this step, runs."""
        off, held, left = self._now(step)
        lasting_steps *= off
        held, left = np.append(held, prompt_tokens), np.append(left, lasting_steps)
        by_end = np.argsort(-left, kind="stable")
        left = left[by_end]
        at_end = np.cumsum(held[by_end]) + np.arange(1, len(left) + 1) * left
        return float(at_end[left <= lasting_steps].max())

    def left(self, step: int) -> "ReadingLeft":
        """Reads that remain for all running answers."""
        _, held, left = self._now(step)
        return ReadingLeft(float((left * (held + left / 2.0)).sum()), float(left.max(initial=0.0)))

    def _now(self, step: int) -> tuple[float, FloatArray, FloatArray]:
        """Factor by which answers are longer than expected; tokens held and remaining steps of each."""
        started, prompts, lasting = self._rows
        age = step - started
        expected = self._expected + lasting.sum()
        # A running answer will have lasted at least as long as expected.
        off = float((self._lasted + np.maximum(age, lasting).sum()) / expected) if expected else 1.0
        left = off * lasting - age
        return off, prompts + age, np.where(left > 0.0, left, OVERDUE * age)


class MemoryShares:
    """Memory that each end holds while its requests run, which decides the end to take from next (section 5.3).

    A request that ends frees its memory. If answers are shorter than expected, more of that end follow, otherwise
    fewer.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[bool, float, float]] = {}
        """Running requests by id: whether they belong to the right end, their tokens, their seconds of memory time."""
        self._used = [0.0, 0.0]
        self._memory_s = [0.0, 0.0]
        """Memory time of all running requests, from their first step to their last, for each end."""
        self._ahead = MemoryAhead()
        """Predicted memory of the right end."""
        self._num_steps = 0
        self._right_due = 0.0
        """Step from which the next request of the right end may start."""

    def copy(self) -> "MemoryShares":
        """A copy for looking ahead."""
        other = MemoryShares()
        other._held, other._used, other._memory_s = dict(self._held), list(self._used), list(self._memory_s)
        other._num_steps, other._right_due, other._ahead = self._num_steps, self._right_due, self._ahead.copy()
        return other

    def begin_step(self) -> None:
        self._num_steps += 1

    @property
    def is_right_idle(self) -> bool:
        """Whether no request of the right end runs."""
        return not len(self._ahead)

    def left(self, kv_token_s: float) -> ReadingLeft:
        """Reads that remain for all running requests.

        Short answers of the left end are at all ages, so half of their reads remain.
        """
        tokens, longest_steps = self._ahead.left(self._num_steps)
        return ReadingLeft(tokens + self._memory_s[0] / 2.0 / kv_token_s, longest_steps)

    def is_right_next(self, left_density: float, right_density: float, root_density: float) -> bool:
        """Whether to take from the right end, which is not before its next start (``start``).

        The end that is further below its part comes first. At equal distance it is the right one, which lasts longer.
        """
        if self._num_steps < int(self._right_due):
            return False
        parts = split_memory(1.0, left_density, right_density, root_density)
        return parts.right > 0.0 and _is_right_next(self._used, parts)

    def has_room(self, held_tokens: float, lasting_steps: float, room_tokens: float) -> bool:
        """Whether one more request of the right end fits for its whole time; a single one always fits."""
        prompt_tokens = held_tokens - lasting_steps / 2.0
        peak_tokens = self._ahead.peak_tokens(self._num_steps, prompt_tokens, lasting_steps)
        return not len(self._ahead) or peak_tokens <= room_tokens

    def start(
        self,
        request_id: str,
        is_right: bool,
        held_tokens: float,
        lasting_steps: float = 0.0,
        memory_s: float = 0.0,
        apart_steps: float = 0.0,
    ) -> None:
        """Starts a request.

        Args:
            apart_steps: steps until the next request of the right end. Algorithm 3 admits as many prompt tokens per
                step as a steady state does. Long answers that all start at once grow together, and overflow together.
        """
        self._held[request_id] = is_right, held_tokens, memory_s
        self._used[is_right] += held_tokens
        self._memory_s[is_right] += memory_s
        if is_right:
            self._ahead.start(request_id, self._num_steps, held_tokens - lasting_steps / 2.0, lasting_steps)
            self._right_due = max(self._right_due, float(self._num_steps)) + apart_steps

    def expect(self, lasting_steps: Mapping[str, float]) -> None:
        """Sets new expected steps of running requests, by id, from a new plan."""
        self._ahead.expect(lasting_steps)

    def end(self, request_id: str) -> None:
        """Ends a request; ignores one that was never started."""
        is_right, tokens, memory_s = self._held.pop(request_id, (False, 0.0, 0.0))
        self._used[is_right] -= tokens
        if is_right:
            self._ahead.end(request_id, self._num_steps)
        self._memory_s[is_right] -= memory_s
        if not self._held:
            self._used, self._memory_s = [0.0, 0.0], [0.0, 0.0]  # Clears rounding errors.


def _is_right_next(used: Sequence[float], parts: Split) -> bool:
    """Compares without a division, because a part may be 0."""
    return used[1] * parts.left <= used[0] * parts.right


WINDOW_ROWS = 64
"""Number of lines over which an end's density is averaged; that of a single line is too noisy."""
MIN_WINDOWS = 16
"""Least number of windows in the pool, which limits their size."""


def window_rows(count: int) -> int:
    """Lines of a window in an order of ``count`` lines."""
    return max(min(WINDOW_ROWS, count // MIN_WINDOWS), 1)


def window_sums(seconds: FloatArray) -> list[float]:
    sums: list[float] = np.add.reduceat(seconds, np.arange(0, len(seconds), window_rows(len(seconds)))).tolist()
    return sums


def window_densities(compute_s: FloatArray, memory_s: FloatArray) -> list[float]:
    if not len(compute_s):
        return []
    starts = np.arange(0, len(compute_s), window_rows(len(compute_s)))
    densities: list[float] = (np.add.reduceat(compute_s, starts) / np.add.reduceat(memory_s, starts)).tolist()
    return densities


def dual_scan_order(
    compute_s: FloatArray, memory_s: FloatArray, held_tokens: FloatArray, lasting_steps: FloatArray, kv_tokens: float
) -> IntArray:
    """Order in which the two scanners take rows that are sorted by density, as indices into them.

    Each end fills its part of the memory (``split_memory``, by the current densities at the ends). Where there is no
    room, time passes to the next end of a request. An end without requests may start one that is larger than its part.
    A request holds its average memory for as many steps as it has output tokens, which is Algorithm 3's steady state;
    the prefill tokens per step follow from it. If both ends have room, the end further below its part comes first; at
    equal distance it is the right one, which lasts longer.

    Args:
        held_tokens: ``p + d/2`` of each row.
        lasting_steps: output tokens of each row.
        kv_tokens: tokens that the whole memory holds.
    """
    count = len(compute_s)
    width = window_rows(count)
    densities = window_densities(compute_s, memory_s)
    root = float(compute_s.sum() / memory_s.sum()) if count else 0.0
    held, lasting = held_tokens.tolist(), lasting_steps.tolist()
    ends: list[tuple[float, int, float]] = []
    """Heap of running requests: end time, side, held tokens."""
    used, now, order = [0.0, 0.0], 0.0, list[int]()
    at, last = [0, count - 1], (-1, -1)
    parts = Split(0.0, 0.0)
    while at[0] <= at[1]:
        ends_at = (at[0] // width, at[1] // width)
        if ends_at != last:
            parts, last = split_memory(kv_tokens, densities[ends_at[0]], densities[ends_at[1]], root), ends_at
        spare = kv_tokens - used[0] - used[1]
        room = [
            used[side] + held[at[side]] <= parts[side] or (not used[side] and (held[at[side]] <= spare or not ends))
            for side in (0, 1)
        ]
        if any(room):
            right = room[1] and (not room[0] or _is_right_next(used, parts))
        elif ends:
            now, side, tokens = heappop(ends)
            used[side] = used[side] - tokens if used[side] > tokens else 0.0
            continue
        else:
            used = [0.0, 0.0]  # Nothing runs: clear rounding errors.
            continue
        side = int(right)
        row = at[side]
        order.append(row)
        used[side] += held[row]
        heappush(ends, (now + lasting[row], side, held[row]))
        at[side] += -1 if right else 1
    return np.array(order, np.int64)
