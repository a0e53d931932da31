"""The pace of offline prompts in an order without a plan: as many tokens a step as rows end and make room for.

Prompts in as few steps as possible leave steps with decodes alone between them, whose compute is idle while weights and
KV are read. Evenly spread, prompts take what would be idle. Without decodes, or with memory for many more rows, there
is nothing to wait for.
"""

from collections import deque

from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.judgement import NEXT_TO_NOTHING
from neaptide.engine.scheduler.traffic import RECENT

EVEN_PROMPTS = 8.0
"""Prompts that may be behind at the even pace, because rows do not end evenly. With more it rises."""


class PromptPace:
    """Lengths of recent offline rows, and the pace that follows from them."""

    def __init__(self) -> None:
        self._prompts: deque[int] = deque(maxlen=RECENT)
        self._answers: deque[int] = deque(maxlen=RECENT)

    def observe_admission(self, num_tokens: int) -> None:
        """A row was admitted with so many tokens to compute."""
        self._prompts.append(num_tokens)

    def observe_end(self, num_output_tokens: int) -> None:
        if num_output_tokens:
            self._answers.append(num_output_tokens)

    def chunk_tokens(
        self,
        budget: StepBudget,
        num_decodes: int,
        unfinished_tokens: int,
        context_tokens: int,
        room_tokens: int,
        num_seats: int,
    ) -> int:
        """Most prompt tokens of a step that has its offline decodes.

        It keeps up with the rows that end, and among chunks that do its tokens cost the least time.

        Args:
            budget: of the step so far.
            num_decodes: offline decodes in the step.
            unfinished_tokens: of running prompts.
            context_tokens: computed tokens of the first of them.
            room_tokens: tokens of memory for further rows.
            num_seats: further rows that may run.
        """
        most = budget.tokens_left
        if most <= 0 or not num_decodes or not self._answers or not self._prompts:
            return most
        prompt_tokens = max(sum(self._prompts) / len(self._prompts), 1.0)
        answer_tokens = sum(self._answers) / len(self._answers)
        num_behind = unfinished_tokens / prompt_tokens + max(min(num_seats, room_tokens // prompt_tokens), 0.0)
        excess = max(num_behind / EVEN_PROMPTS, 1.0)
        # Where many rows are missing, those to come count too: a few decodes make room for few.
        num_rows = num_decodes + EVEN_PROMPTS * (excess - 1.0)
        tokens = int(excess * num_rows * prompt_tokens / answer_tokens) + 1
        return most if tokens >= most else _cheapest(budget, tokens, most, context_tokens)


def _cheapest(budget: StepBudget, least: int, most: int, context_tokens: int) -> int:
    """The chunk from ``least`` to ``most`` tokens whose tokens take the least time beside what is in the step.

    Fewer tokens must be cheaper by more than the cost model may err.
    """
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    alone_s, chunk = budget.prediction.seconds, budget.with_chunk(context_tokens)
    token_s = [(sum(chunk(size)) - alone_s) / size for size in sizes]
    enough_s = min(token_s) + NEXT_TO_NOTHING * abs(min(token_s))
    return max(size for size, each_s in zip(sizes, token_s, strict=True) if each_s <= enough_s)
