"""The running account of one step: tokens, predicted seconds; and what prompts take in steps like it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray, largest
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.steps.plan import BatchShape

HALVE_EVERY = 5
"""Guesses: whatever the times are like, the numbers in question are halved so often."""


def largest_within(limit_s: float, seconds: Callable[[int], float], none_s: float, most: int, most_s: float) -> int:
    """The largest number below ``most`` that takes at most ``limit_s``; 0 if none does.

    Times are nearly straight lines, so the next guess goes on from the last two as on one: three or four predictions,
    where halving alone takes eleven for a step of 2,048 tokens.

    Args:
        seconds: for such a number; must not fall. ``none_s`` is for 0, ``most_s``, above the limit, for ``most``.
    """
    low, high, num_guesses = 0, most, 0
    before, before_s, last, last_s = 0, none_s, most, most_s
    while high - low > 1:
        num_guesses += 1
        if num_guesses % HALVE_EVERY == 0 or last_s == before_s:
            guess = (low + high) // 2
        else:
            guess = int(last + (limit_s - last_s) * (last - before) / (last_s - before_s))
        before, before_s = last, last_s
        last = min(max(guess, low + 1), high - 1)
        last_s = seconds(last)
        if last_s <= limit_s:
            low = last
        else:
            high = last
    return low


class Reads(NamedTuple):
    """KV tokens that some decodes read."""

    total_tokens: int
    longest_tokens: int
    shared_tokens: int = 0
    """Tokens that need not be read, because one read serves several decodes (``Draft.shared_tokens``)."""

    @classmethod
    def among(cls, read_tokens: IntArray, shared_tokens: int = 0) -> "Reads":
        """Reads of at least one decode, from what each reads."""
        return cls(int(np.add.reduce(read_tokens)), largest(read_tokens), shared_tokens)

    @classmethod
    def of(cls, contexts: IntArray, shared_tokens: int = 0) -> "Reads":
        """Reads of at least one decode, from the computed tokens of each; each also reads what it computes."""
        total_tokens, longest_tokens, _ = cls.among(contexts)
        return cls(total_tokens + len(contexts), longest_tokens + 1, shared_tokens)


class StepBudget:
    """Adds requests to a step one at a time; every question costs O(1) predictions, a chunk size O(log n)."""

    def __init__(self, cost_model: CostModel, max_tokens: int, mask_wait_s: float = 0.0) -> None:
        self._cost_model = cost_model
        self._mask_wait_s = mask_wait_s
        """What a step waits for masks, beside what the cost model knows of."""
        self.tokens_left = max_tokens
        self.expected_limit_s = math.inf
        """What it may be predicted to take while it is filled, its margin aside, whatever limit is asked about."""
        self.shape = BatchShape()
        self._asked: BatchShape | None = None
        """What was asked about last; most steps are before they are made so. The answer holds for as long as a draft is
        made: the cost model learns between two of them."""
        self._answer = self._own = Prediction(0.0, 0.0)
        self._own_shape: BatchShape | None = None
        """The step's shape when it was asked about as it is, which is often between questions about chunks."""

    @property
    def prediction(self) -> Prediction:
        """What the step takes as it is."""
        if self.shape != self._own_shape:
            self._own = self._answer if self.shape == self._asked else self.predict(self.shape.copy())
            self._own_shape = self._asked
        return self._own

    def predict(self, shape: BatchShape) -> Prediction:
        """Time of a step of this shape, which does not change any more, with the wait for masks."""
        seconds, margin_s = self._cost_model.predict(shape)
        self._asked, self._answer = shape, Prediction(seconds + self._mask_wait_s, margin_s)
        return self._answer

    def expected_s(self, shape: BatchShape) -> float:
        """The same without the margin, for shapes that the step will hardly have: the last answer is kept."""
        return self._cost_model.predict(shape).seconds + self._mask_wait_s

    def _most_s(self, prediction: Prediction, limit_s: float) -> float:
        """What such a step takes at most, or as much more than ``limit_s`` as its prediction is above its own limit."""
        seconds, margin_s = prediction
        if self.expected_limit_s < limit_s < math.inf:
            margin_s = max(margin_s, limit_s - self.expected_limit_s)
        return seconds + margin_s

    def with_margin_s(self, expected_s: float) -> float:
        """``expected_s`` and the margin of a step like this one that is predicted to take so long."""
        seconds, margin_s = self.prediction
        return expected_s * (1.0 + margin_s / seconds) if seconds > 0.0 else expected_s

    def predict_with(self, num_tokens: int) -> Prediction:
        """What the step takes with a chunk of so many tokens without context, or as it is with 0."""
        return self.predict(self.shape.plus(num_tokens, 0)) if num_tokens else self.prediction

    def least_s(self) -> float:
        """What a step takes that does next to nothing."""
        shape = BatchShape()
        shape.add_decodes(1, 1, 1)
        return self._cost_model.predict(shape).seconds

    def most_decodes(
        self,
        contexts: IntArray,
        limit_s: float,
        reads: Reads | None = None,
        shared_tokens: Callable[[int], int] = lambda count: 0,
    ) -> int:
        """How many of these decodes, taken from the front, keep the step within ``limit_s``.

        Args:
            contexts: computed tokens of each.
            reads: of all of them, if it is known.
            shared_tokens: of the first decodes, the tokens that they need not read; see ``Reads``.
        """
        most = min(len(contexts), self.tokens_left)
        if most <= 0:
            return 0
        shape = self.shape
        if reads is None or most < len(contexts):
            reads = Reads.of(contexts[:most], shared_tokens(most))
        all_s = self._most_s(self.predict(shape.plus_decodes(most, *reads)), limit_s)
        if all_s <= limit_s:
            return most
        read_tokens = contexts + 1
        sums, longest = np.cumsum(read_tokens), np.maximum.accumulate(read_tokens)

        def seconds(count: int) -> float:
            reads = Reads(int(sums[count - 1]), int(longest[count - 1]), shared_tokens(count))
            return self._most_s(self.predict(shape.plus_decodes(count, *reads)), limit_s)

        return largest_within(limit_s, seconds, self._most_s(self.prediction, limit_s), most, all_s)

    def largest_chunk(self, max_tokens: int, context_tokens: int, limit_s: float, swapped_blocks: int = 0) -> int:
        """The largest chunk of at most ``max_tokens`` that keeps the step within ``limit_s``; 0 if none does.

        Args:
            swapped_blocks: of the context, that come from host memory.
        """
        return self.largest(self.with_chunk(context_tokens, swapped_blocks), max_tokens, limit_s)

    def with_chunk(self, context_tokens: int, swapped_blocks: int = 0) -> Callable[[int], Prediction]:
        """What the step, as it is now, takes with a chunk of so many tokens behind this context."""

        def predict(num_tokens: int) -> Prediction:
            shape = self.shape.plus(num_tokens, context_tokens)
            shape.swapped_blocks += swapped_blocks
            return self.predict(shape)

        return predict

    def largest(self, chunk: Callable[[int], Prediction], max_tokens: int, limit_s: float) -> int:
        """The largest chunk within ``limit_s``, as ``largest_chunk`` finds it, from a ``with_chunk``'s predictions."""
        most = min(max_tokens, self.tokens_left)
        if most <= 0:
            return 0

        def seconds(num_tokens: int) -> float:
            return self._most_s(chunk(num_tokens), limit_s)

        all_s = seconds(most)
        if all_s <= limit_s:
            return most
        return largest_within(limit_s, seconds, self._most_s(self.prediction, limit_s), most, all_s)

    def add_decodes(self, count: int, reads: Reads) -> None:
        self.tokens_left -= count
        self.shape.add_decodes(count, *reads)

    def add(self, num_tokens: int, context_tokens: int) -> None:
        self.tokens_left -= num_tokens
        self.shape.add(num_tokens, context_tokens)


@dataclass(slots=True, frozen=True)
class PromptSteps:
    """What prompt tokens cost beside the decodes of now, counted in steps.

    Measured in such a step, not in one of their own: there they pay for the reading of weights, which the decodes have
    paid for here, or share a step's fixed cost with more tokens than fit here.
    """

    step_s: float
    """Expected time of a step full of prompt tokens."""
    margin_s: float
    """Margin of each such step."""
    least_s: float
    """Time of the step without them."""
    token_steps: float
    """Steps that a token without context takes: one over the tokens of a step."""
    context_steps: float
    """Increase of ``token_steps`` with each token of context."""

    @classmethod
    def beside(
        cls, budget: StepBudget, limits_s: Sequence[float], least_tokens: int, longest_tokens: int
    ) -> "list[PromptSteps]":
        """Beside what is in the step by now, for each limit of the steps to come.

        Args:
            least_tokens: of prompts in every step, whatever the limit; at least 1.
            longest_tokens: of the prompts that are asked for.
        """
        most, context = max(budget.tokens_left, least_tokens), longest_tokens // 2
        # The limits ask about the same chunks again and again.
        plain, deep = cache(budget.with_chunk(0)), cache(budget.with_chunk(context))
        alone_s = budget.prediction.seconds
        steps: list[PromptSteps] = []
        for limit_s in limits_s:
            first = max(budget.largest(plain, most, limit_s), least_tokens)
            behind = max(budget.largest(deep, most, limit_s), least_tokens)
            context_steps = max(1 / behind - 1 / first, 0.0) / context if context else 0.0
            steps.append(cls(*plain(first), alone_s, 1 / first, context_steps))
        return steps

    def of(self, num_tokens: FloatArray, context_tokens: FloatArray) -> FloatArray:
        """[prompts] steps that so many tokens of each take behind so much context."""
        return num_tokens * (self.token_steps + self.context_steps * (context_tokens + num_tokens / 2))

    def seconds(self, steps: float) -> float:
        """That so many steps are expected to take; the last may be a part of one."""
        whole = math.floor(steps)
        part_s = self.least_s + (steps - whole) * (self.step_s - self.least_s) if steps > whole else 0.0
        return whole * self.step_s + part_s

    def most_late_s(self, steps: float) -> float:
        """By which so many steps may take longer: their errors, if they are independent, grow with the root."""
        return self.margin_s * math.sqrt(max(steps, 1.0))
