"""SlidingServe (arXiv 2606.05933): chunks of two consecutive steps, a priority sorter, a knapsack.

Sources: the paper's abstract, and two summaries of its method. Its text and code were not at hand. Known are the four
parts and these rules. The predictor is linear in features of the batch. The sorter's key has three levels: whether the
request's target is still protected, its urgency (work left over time left), its work left. The chunker finds the chunk
of this step and of the next together by a discrete ternary search, within the least slack of the running streams. If
first tokens are predicted to be late, a 0/1 knapsack by dynamic programming chooses who runs.

Chosen here, because the sources do not say it:

- The two steps share the tokens that two greedy ones would take. The greedy division stays unless another saves 1% of
  the time.
- A request is protected while it can be in time if it starts now, at the rate of a greedy step. It is urgent once that
  takes half of the time that it has. A continuous urgency would leave nothing to the third level; in overload it made
  all first tokens just late.
- The knapsack is asked at the first protected request, in the sorter's order, that is late behind those before it. Its
  items are this one and those, its capacity is the time left to it, and each is worth one first token in time. The step
  is then greedy.
- The engine's cost model is the predictor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

from neaptide.policy import BatchShape, Draft, Request
from neaptide_lab.policies.deadline_chunks import DeadlineChunkScheduler

UNIT_TOKENS = 16
"""Granularity of chunks in the search."""
KNAPSACK_UNITS = 128
"""Parts into which the knapsack's capacity is divided."""
LEAST_SAVING = 0.01
"""Part of the time of two greedy steps that a smaller chunk must save. Without it the search puts work off again and
again for next to nothing."""
MAX_CANDIDATES = 64
"""Longest list of prompts that the sorter hands to the knapsack."""
URGENT_SHARE = 0.5
"""A request is urgent if its work takes this part of the time until its deadline, or more."""


class Chunks(NamedTuple):
    """Prompt tokens of this step and of the next."""

    now: int
    then: int


def ternary_search(low: int, high: int, value: Callable[[int], float]) -> int:
    """The argument in ``low..high`` with the largest value, if the values rise and then fall. Ties go to the larger."""
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if value(left) > value(right):
            high = right - 1
        else:
            low = left + 1
    return max(range(low, high + 1), key=lambda argument: (value(argument), argument))


def knapsack(weights: Sequence[int], capacity: int) -> list[int]:
    """Indices of the most items whose weights fit together, by dynamic programming; ties go to the earlier items."""
    best: list[tuple[int, ...]] = [()] * (capacity + 1)
    for index, weight in enumerate(weights):
        for room in range(capacity, weight - 1, -1):
            with_it = (*best[room - weight], index)
            if len(with_it) > len(best[room]):
                best[room] = with_it
    return list(best[capacity])


@dataclass(slots=True, frozen=True)
class Candidate:
    """A prompt that may have tokens in this step."""

    request: Request
    tokens: int
    """Tokens that it lacks."""
    takes_s: float
    """Time of what it lacks at the rate of a greedy step, in seconds."""
    left_s: float
    """Time until its deadline, in seconds."""

    @property
    def is_protected(self) -> bool:
        """Whether it can still be in time."""
        return self.takes_s <= self.left_s

    @property
    def is_urgent(self) -> bool:
        """Whether its work takes a large part of the time that it has."""
        return self.takes_s >= URGENT_SHARE * self.left_s

    @property
    def key(self) -> tuple[bool, bool, int, float, str]:
        """The sorter's: protected first, then urgent, then the least work."""
        return (
            not self.is_protected,
            not self.is_urgent,
            self.tokens,
            self.request.arrival_s,
            self.request.request_id,
        )


@dataclass(slots=True, frozen=True)
class Slack:
    """Time that the running streams leave to a step and to the next one; infinite without streams."""

    now_s: float
    """Longest this step may take, in seconds."""
    both_s: float
    """Longest this step and the next may take together, in seconds."""

    @classmethod
    def of(cls, left_s: Sequence[float], tpot_slo_s: Sequence[float], alone_s: float) -> "Slack":
        """The slack of streams.

        A stream that would be late with decodes alone bounds nothing. If all would be, the tightest TPOT target bounds
        the steps.

        Args:
            left_s: time until the next token of each stream is due, in seconds.
            tpot_slo_s: TPOT target of each, in seconds.
            alone_s: predicted time of a step with their decodes alone, in seconds.
        """
        if not left_s:
            return cls(math.inf, math.inf)
        able = [(left, left + tpot) for left, tpot in zip(left_s, tpot_slo_s, strict=True) if left >= alone_s]
        if not able:
            tightest_s = min(tpot_slo_s)
            return cls(tightest_s, 2.0 * tightest_s)
        return cls(min(left for left, _ in able), min(then for _, then in able))


def construct(candidates: Sequence[Candidate]) -> list[Request] | None:
    """The batch constructor: an order of the prompts in which the most of the first ones are in time.

    None if no protected prompt is predicted to be late in the sorter's order.
    """
    first = candidates[:MAX_CANDIDATES]
    ends_s = accumulate(candidate.takes_s for candidate in first)
    late = (n for n, end_s in enumerate(ends_s) if first[n].is_protected and end_s > first[n].left_s)
    num_before = next(late, None)
    if num_before is None:
        return None
    items, rest = candidates[: num_before + 1], candidates[num_before + 1 :]
    unit_s = items[-1].left_s / KNAPSACK_UNITS
    weights = [math.ceil(item.takes_s / unit_s) for item in items]
    chosen = set(knapsack(weights, KNAPSACK_UNITS))
    kept = [item for place, item in enumerate(items) if place in chosen]
    dropped = [item for place, item in enumerate(items) if place not in chosen]
    order = [*kept, *(c for c in rest if c.is_protected), *dropped, *(c for c in rest if not c.is_protected)]
    return [candidate.request for candidate in order]


class SlidingServe(DeadlineChunkScheduler):
    """Every stream decodes; the chunk is the first of the best two, and the sorter or the knapsack divides it."""

    safety: ClassVar[float] = 1.0
    """Factor on predicted step times, which must stay below the slack."""

    def pack(self, draft: Draft) -> float:
        streams = self.decode(draft, self.streams(draft))
        decodes, most = draft.budget.shape.copy(), draft.budget.tokens_left
        slack = Slack.of(
            [self.due_s(request) - draft.now_s for request in streams],
            [request.tpot_slo_s for request in streams],
            self._step_s(decodes, 0, 0),
        )
        slack = Slack(slack.now_s / self.safety, slack.both_s / self.safety)
        greedy = self.largest_chunk(decodes, most, 0, slack.now_s, UNIT_TOKENS)
        candidates = self.candidates(draft, self._step_s(decodes, greedy, 0) / greedy if greedy else math.inf)
        has_offline = not self.offline_paused and (draft.num_running_offline > 0 or len(draft.pool) > 0)
        pending = sum(candidate.tokens for candidate in candidates)
        if (batch := construct(candidates)) is not None:
            chunk = greedy
        else:
            batch = [candidate.request for candidate in candidates]
            chunk = self.best_chunks(decodes, 2 * most if has_offline else pending, most, slack).now
        left = self.serve(draft, batch, chunk)
        self.fill(draft, left, slack.now_s)
        return slack.now_s

    # ---- multi-level priority sorter ----

    def candidates(self, draft: Draft, token_s: float) -> list[Candidate]:
        """Online prompts, running and waiting, in the sorter's order.

        Args:
            draft: the step.
            token_s: predicted time of a prompt token in a greedy step, in seconds.
        """
        found = []
        for request in [*self.prompts(draft), *draft.waiting_online]:
            is_running = draft.is_running(request)
            tokens = draft.kv.num_uncomputed(request) if is_running else request.num_known_tokens
            found.append(Candidate(request, tokens, tokens * token_s, self.due_s(request) - draft.now_s))
        return sorted(found, key=lambda candidate: candidate.key)

    # ---- sliding chunker ----

    def best_chunks(self, decodes: BatchShape, pending_tokens: int, most_tokens: int, slack: Slack) -> Chunks:
        """Divides the prompt tokens that two greedy steps would take so that both steps take the least time.

        Args:
            decodes: what both steps do besides.
            pending_tokens: prompt tokens that wait.
            most_tokens: most prompt tokens of one step.
            slack: of the running streams.
        """
        most_now = self.largest_chunk(decodes, min(most_tokens, pending_tokens), 0, slack.now_s, UNIT_TOKENS)
        if not most_now:
            return Chunks(0, 0)
        left_s = slack.both_s - self._step_s(decodes, most_now, 0)
        most_then = self.largest_chunk(decodes, min(most_tokens, pending_tokens - most_now), most_now, left_s)
        both = most_now + most_then

        def of(units: int) -> Chunks:
            now = min(units * UNIT_TOKENS, most_now)
            return Chunks(now, both - now)

        def seconds(chunks: Chunks) -> float:
            return self._step_s(decodes, chunks.now, 0) + self._step_s(decodes, chunks.then, chunks.now)

        least = max(-(-(both - most_tokens) // UNIT_TOKENS), 0)
        greedy = -(-most_now // UNIT_TOKENS)
        found = of(ternary_search(least, greedy, lambda units: -seconds(of(units))))
        return found if seconds(found) < (1.0 - LEAST_SAVING) * seconds(of(greedy)) else of(greedy)

    def _step_s(self, decodes: BatchShape, chunk: int, context_tokens: int) -> float:
        """Predicted time of a step, in seconds; 0 for one without any work."""
        shape = decodes.plus(chunk, context_tokens) if chunk else decodes
        return self.cost_model.predict(shape).seconds if shape.num_tokens else 0.0


class SlidingServePaced(SlidingServe):
    """Deadlines from the first token, which is how TPOT is measured here, and a reserve for the predictor's error."""

    counts_from_arrival, safety = False, 1.1
