"""Remaining work of a batch, and its least time."""

import math
from dataclasses import dataclass
from typing import Protocol

from neaptide.engine.interfaces import CostModel
from neaptide.engine.steps.plan import BatchShape


@dataclass(slots=True, frozen=True)
class Work:
    """Remaining work of one or several batches, with expected answer lengths."""

    num_rows: int = 0
    """Lines that have not ended."""
    row_tokens: int = 0
    """Prompt and answer tokens of these lines, done or not, which is what they hold in the end."""
    prompt_tokens: int = 0
    """Prompt tokens that are not computed yet."""
    new_tokens: int = 0
    """Prompt tokens that are not computed yet, without those shared with an earlier line."""
    answer_tokens: int = 0
    """Answer tokens that are not sampled yet."""
    decode_tokens: int = 0
    """Answer tokens that are not sampled yet, without each first one, which comes with the prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens as tenants are charged for them, cached ones included."""
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


class LeastTime(Protocol):
    """An engine with offline work alone."""

    def least_seconds(self, work: Work) -> float:
        """Least time of the work, if nothing else runs."""
        ...


@dataclass(slots=True, frozen=True)
class WholeDevice:
    """The engine with offline work alone, by a cost model. Implements ``LeastTime``.

    Args:
        kv_tokens: tokens of KV that offline work may hold.
    """

    cost_model: CostModel
    max_step_tokens: int
    max_num_seqs: int
    kv_tokens: int

    def least_seconds(self, work: Work) -> float:
        """Least time of the work, if nothing else runs, prefixes are computed once, and every step is full.

        Assumes lines of equal length and prompts that last as long as answers, so that decodes and chunks share every
        step. Any other mix takes longer. Takes two predictions of the cost model, whatever the amount of work.
        """
        if not work.num_rows:
            return 0.0
        num_steps = self.num_steps(work)
        return num_steps * self.cost_model.predict(self._step(work, num_steps)).seconds

    def num_steps(self, work: Work) -> int:
        """Steps that the least time counts, all of them full."""
        # Shared prompt tokens are held once.
        held_tokens = max(work.row_tokens - work.prompt_tokens + work.new_tokens, 1)
        most_rows = min(work.num_rows, self.max_num_seqs, self.kv_tokens * work.num_rows // held_tokens)
        computed_tokens = work.new_tokens + work.decode_tokens
        in_turn, by_tokens = work.decode_tokens / max(most_rows, 1), computed_tokens / self.max_step_tokens
        return max(math.ceil(in_turn), math.ceil(by_tokens), 1)

    @staticmethod
    def _step(work: Work, num_steps: int) -> BatchShape:
        """Shape of one of ``num_steps`` equal steps."""
        shape = BatchShape()
        if num_decodes := work.decode_tokens // num_steps:
            context = max((work.row_tokens - work.answer_tokens // 2) // work.num_rows, 1)
            shape.add_decodes(num_decodes, num_decodes * context, context)
        if chunk := work.new_tokens // num_steps:
            shared = (work.prompt_tokens - work.new_tokens) // num_steps
            shape.prefill_tokens = chunk
            shape.prefill_requests = max(work.num_rows // num_steps, 1)
            shape.prefill_context_tokens = shared
            # Every new token attends to the shared ones and on average to half of the new ones.
            of_row, row_context = chunk / shape.prefill_requests, shared / shape.prefill_requests
            shape.prefill_attention_pairs = int(chunk * (row_context + of_row / 2))
            shape.max_context_tokens = max(shape.max_context_tokens, int(row_context + of_row))
        return shape
