"""The running account of one step: tokens, predicted seconds."""

from bisect import bisect_left

import numpy as np

from neaptide.engine.arrays import IntArray
from neaptide.engine.interfaces import CostModel
from neaptide.engine.steps.plan import BatchShape


class StepBudget:
    """Adds requests to a step one at a time; every question costs O(1) predictions, a chunk size O(log n)."""

    def __init__(self, cost_model: CostModel, max_tokens: int) -> None:
        self._cost_model = cost_model
        self.tokens_left = max_tokens
        self.shape = BatchShape()

    def fits(self, num_tokens: int, context_tokens: int, limit_s: float, swapped_blocks: int = 0) -> bool:
        if num_tokens > self.tokens_left:
            return False
        shape = self.shape.plus(num_tokens, context_tokens)
        shape.swapped_blocks += swapped_blocks
        seconds, margin_s = self._cost_model.predict(shape)
        return seconds + margin_s <= limit_s

    def least_s(self) -> float:
        """What a step takes that does next to nothing."""
        shape = BatchShape()
        shape.add_decodes(1, 1, 1)
        return self._cost_model.predict(shape).seconds

    def most_decodes(self, contexts: IntArray, limit_s: float) -> int:
        """How many of these decodes, taken from the front, keep the step within ``limit_s``.

        ``contexts`` are the KV tokens that each reads.
        """

        def fits(count: int, kv_tokens: int, longest_tokens: int) -> bool:
            seconds, margin_s = self._cost_model.predict(self.shape.plus_decodes(count, kv_tokens, longest_tokens))
            return seconds + margin_s <= limit_s

        most = min(len(contexts), self.tokens_left)
        if most > 0 and fits(most, int(contexts[:most].sum()), int(contexts[:most].max())):
            return most
        sums, longest = np.cumsum(contexts), np.maximum.accumulate(contexts)
        return bisect_left(range(1, most), True, key=lambda n: not fits(n, int(sums[n - 1]), int(longest[n - 1])))

    def largest_chunk(self, max_tokens: int, context_tokens: int, limit_s: float, swapped_blocks: int = 0) -> int:
        """The largest chunk of at most ``max_tokens`` that keeps the step within ``limit_s``; 0 if none does.

        Args:
            swapped_blocks: of the context, that come from host memory.
        """
        most = min(max_tokens, self.tokens_left)
        if most <= 0 or self.fits(most, context_tokens, limit_s, swapped_blocks):
            return max(most, 0)
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(middle, context_tokens, limit_s, swapped_blocks):
                low = middle
            else:
                high = middle
        return low

    def seconds_each(self, num_tokens: int, context_tokens: int) -> float:
        """What each token of such a chunk adds to the step."""
        with_it_s = self._cost_model.predict(self.shape.plus(num_tokens, context_tokens)).seconds
        return (with_it_s - self._cost_model.predict(self.shape).seconds) / num_tokens

    def add_decodes(self, contexts: IntArray) -> None:
        """Decodes on so many computed tokens each, at least one."""
        count = len(contexts)
        self.tokens_left -= count
        self.shape.add_decodes(count, int(np.add.reduce(contexts)) + count, int(np.maximum.reduce(contexts)) + 1)

    def add(self, num_tokens: int, context_tokens: int) -> None:
        self.tokens_left -= num_tokens
        self.shape.add(num_tokens, context_tokens)
