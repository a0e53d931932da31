"""How much is left to do of a batch, and how long it takes at the very least."""

import math
from dataclasses import dataclass

from neaptide.engine.interfaces import CostModel
from neaptide.engine.steps.plan import BatchShape


@dataclass(slots=True, frozen=True)
class Work:
    """What is left of a batch, or of several. Answers are those that are expected."""

    num_rows: int = 0
    """Without an end."""
    row_tokens: int = 0
    """Of all their prompts and answers, done or not: what they hold in the end."""
    prompt_tokens: int = 0
    """Not computed yet ..."""
    new_tokens: int = 0
    """... and of those, without what a row shares with one before it."""
    answer_tokens: int = 0
    """Not sampled yet ..."""
    decode_tokens: int = 0
    """... and of those, without the first of each answer, which the end of its prompt brings."""

    @property
    def num_tokens(self) -> int:
        """As shares count them: cached ones as well."""
        return self.prompt_tokens + self.answer_tokens

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.num_rows + other.num_rows,
            self.row_tokens + other.row_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.new_tokens + other.new_tokens,
            self.answer_tokens + other.answer_tokens,
            self.decode_tokens + other.decode_tokens,
        )


@dataclass(slots=True, frozen=True)
class WholeDevice:
    """The engine as it would be with offline work alone.

    Args:
        kv_tokens: that offline work may hold.
    """

    cost_model: CostModel
    max_step_tokens: int
    max_num_seqs: int
    kv_tokens: int

    def least_seconds(self, work: Work) -> float:
        """Time that the work takes if nothing else runs, prefixes are computed once, and every step is full.

        Rows are taken to be of one length, and prompts to last as long as answers, so that decodes and chunks share
        every step: what differs from that takes longer. Two questions to the cost model, however much work it is.
        """
        if not work.num_rows:
            return 0.0
        # Prompts that rows share are held once.
        held_tokens = max(work.row_tokens - work.prompt_tokens + work.new_tokens, 1)
        most_rows = min(work.num_rows, self.max_num_seqs, self.kv_tokens * work.num_rows // held_tokens)
        computed_tokens = work.new_tokens + work.decode_tokens
        in_turn, by_tokens = work.decode_tokens / max(most_rows, 1), computed_tokens / self.max_step_tokens
        num_steps = max(math.ceil(in_turn), math.ceil(by_tokens), 1)
        return num_steps * self.cost_model.predict(self._step(work, num_steps)).seconds

    @staticmethod
    def _step(work: Work, num_steps: int) -> BatchShape:
        """One of so many equal steps."""
        shape = BatchShape()
        if num_decodes := work.decode_tokens // num_steps:
            context = max((work.row_tokens - work.answer_tokens // 2) // work.num_rows, 1)
            shape.add_decodes(num_decodes, num_decodes * context, context)
        if chunk := work.new_tokens // num_steps:
            shared = (work.prompt_tokens - work.new_tokens) // num_steps
            shape.prefill_tokens = chunk
            shape.prefill_requests = max(work.num_rows // num_steps, 1)
            shape.prefill_context_tokens = shared
            # Every row's new tokens see its shared ones, and on average half of the new ones.
            of_row, row_context = chunk / shape.prefill_requests, shared / shape.prefill_requests
            shape.prefill_attention_pairs = int(chunk * (row_context + of_row / 2))
            shape.max_context_tokens = max(shape.max_context_tokens, int(row_context + of_row))
        return shape
