"""Prompts in a step: the sizes of their chunks, what joins behind a first token, and the credit of late ones."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from neaptide.engine.interfaces import CostModel
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.steps.plan import BatchShape

PACE = 0.9
"""Step length at which streams keep their slack, as a fraction of the TPOT target: noise and delivery need the rest."""
LATE_CREDIT = 0.01
"""Fraction of the time that late prompts get, oldest first, at the cost of those that can be in time."""


class PromptChunks:
    """Chunks of online prompts in one step.

    They are as large as the limit and the tokens allow. The first one always gets a block's worth: streams that fill
    the whole limit must not starve it. What comes behind a prompt that ends must not make its first token late.
    """

    def __init__(self, budget: StepBudget, block_size: int, now_s: float, delivery_latency_s: float) -> None:
        self._budget, self._block_size = budget, block_size
        self._now_s, self._delivery_latency_s = now_s, delivery_latency_s
        self._ends_s = math.inf
        """How long the step may take for the first tokens in it."""
        self.first_tokens_s: list[float] = []
        """Seconds until each first token of the step is due."""

    def size(self, left_tokens: int, context_tokens: int, limit_s: float, swapped_blocks: int = 0) -> int:
        """Tokens of the next chunk, of a prompt with ``left_tokens`` to compute; 0 if none fits."""
        budget = self._budget
        chunk = budget.largest_chunk(left_tokens, context_tokens, min(limit_s, self._ends_s), swapped_blocks)
        least = min(left_tokens, self._block_size, budget.tokens_left)
        if chunk < least and not budget.shape.prefill_requests:
            chunk = least
        return max(chunk, 0)

    def ended(self, deadline_s: float) -> None:
        """A prompt ends with the chunk that was added to the budget last; its first token is due then."""
        due_s = deadline_s - self._delivery_latency_s - self._now_s
        seconds, margin_s = self._budget.prediction
        if seconds <= due_s:
            self._ends_s = min(self._ends_s, max(due_s, seconds + margin_s))
            self.first_tokens_s.append(due_s)


class Company:
    """Those that decode in the steps to come, and who may join them.

    Where all read so much that not even decodes alone keep the pace, every answer is late, and not only that of whoever
    came last.

    Args:
        streams: a step of those that decode now; it grows.
        tpot_slo_s: tightest of their targets that can be met; infinite without any.
        least_tpot_slo_s: a tighter target counts as this one, so that none keeps others out by asking for less.
    """

    def __init__(self, cost_model: CostModel, streams: BatchShape, tpot_slo_s: float, least_tpot_slo_s: float) -> None:
        self._cost_model, self._decodes = cost_model, streams
        self._tpot_slo_s, self._least_tpot_slo_s = tpot_slo_s, least_tpot_slo_s

    def has_room(self, num_tokens: int) -> bool:
        """Whether all keep their pace beside a further request of so many known tokens."""
        if self._tpot_slo_s == math.inf:
            return True
        return self._keeps_pace(self._decodes.plus_decodes(1, num_tokens, num_tokens), self._tpot_slo_s)

    def join(self, num_tokens: int, tpot_slo_s: float) -> None:
        self._decodes.add_decodes(1, num_tokens, num_tokens)
        if tpot_slo_s < self._tpot_slo_s and self._keeps_pace(self._decodes, tpot_slo_s):
            self._tpot_slo_s = tpot_slo_s

    def _keeps_pace(self, decodes: BatchShape, tpot_slo_s: float) -> bool:
        return self._cost_model.predict(decodes).seconds <= PACE * max(tpot_slo_s, self._least_tpot_slo_s)


class Unfinished(NamedTuple):
    """A prompt that goes on after the step."""

    num_tokens: int
    """Tokens to compute after the step."""
    context_tokens: int
    deadline_s: float


def unfinished_s(
    prompts: Iterable[Unfinished], cost_model: CostModel, now_s: float, delivery_latency_s: float
) -> tuple[list[float], float]:
    """Seconds that the step may take for each prompt that goes on after it, and seconds that these take."""
    due_s: list[float] = []
    ahead_s = 0.0
    for num_tokens, context_tokens, deadline_s in prompts:
        shape = BatchShape()
        shape.add(num_tokens, context_tokens)
        ahead_s += cost_model.predict(shape).seconds
        due_s.append(deadline_s - delivery_latency_s - now_s - ahead_s)
    return due_s, ahead_s


class LateCredit:
    """Seconds that late prompts may take from those that can be in time."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __bool__(self) -> bool:
        return self._seconds > 0.0

    def observe(self, has_late: bool, step_s: float, late_s: float) -> None:
        """Notes a planned step of ``step_s``, of which ``late_s`` go to the late prompt whose turn it is."""
        if has_late:
            self._seconds += LATE_CREDIT * step_s - late_s
        else:
            self._seconds = min(self._seconds, 0.0)
