"""A step in pieces that fit into memory.

What a step takes beside weights and KV grows with the tokens that are computed at once. Keys and values go to slots of
their own, so a piece that ran out of memory on its way can be computed again, in smaller ones; and a token reads the
same keys and values whether they were written by its own piece or by one before.
"""

from typing import NamedTuple

import numpy as np
import torch

from neaptide.engine.arrays import IntArray
from neaptide.engine.steps.plan import StepPlan

MORE_AFTER_STEPS = 1000
"""Of steps that were cut: then twice as much is tried, for what took the memory may be gone. One try that fails costs a
step's time at most."""
_SIGNS = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",
    "CUDA error: out of memory",  # the driver's own, on a launch
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is what was raised; neither torch nor CUDA has one class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def free_cached(device: torch.device) -> None:
    """Gives back what torch's allocator keeps: in pieces of other sizes it may be of use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Piece(NamedTuple):
    """Tokens of a step that are computed at once."""

    plan: StepPlan
    parts: IntArray
    """[parts of ``plan``] their parts of the step's plan."""

    @property
    def num_tokens(self) -> int:
        return int(self.plan.num_tokens.sum())


class Remainder:
    """What of a step is still to be computed, in the step's order: what others read is written first."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._left = plan.num_tokens.copy()

    def next_piece(self, max_tokens: int | None) -> Piece | None:
        """The first ``max_tokens`` tokens (None: all); None when nothing is left."""
        plan, left = self._plan, self._left
        if max_tokens is None or left.sum() <= max_tokens:
            if np.array_equal(left, plan.num_tokens):
                return Piece(plan, np.arange(len(plan)))
            max_tokens = int(left.sum())
        before = np.cumsum(left) - left
        counts = np.clip(max_tokens - before, 0, left)
        parts = np.flatnonzero(counts)
        if not len(parts):
            return None
        computed = plan.num_computed + plan.num_tokens - left
        return Piece(plan.cut(parts, counts[parts], computed[parts]), parts)

    def done(self, piece: Piece) -> None:
        self._left[piece.parts] -= piece.plan.num_tokens

    def give_up(self, parts: IntArray) -> None:
        """Nothing more is computed for these."""
        self._left[parts] = 0


class TokenLimit:
    """The most tokens that are computed at once, since memory has run out."""

    def __init__(self) -> None:
        self.max_tokens: int | None = None
        """None: it never has."""
        self._at_step_start: int | None = None
        self._fitted = 0
        """Tokens of the largest piece that was computed."""
        self._cut_steps = 0
        """Since the limit is what it is."""

    def begin_step(self, num_tokens: int) -> None:
        """A step of so many tokens is to be computed."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            self._cut_steps += 1
            if self._cut_steps > MORE_AFTER_STEPS:
                self.max_tokens, self._cut_steps = 2 * self.max_tokens, 0
        self._at_step_start = self.max_tokens

    def fitted(self, num_tokens: int) -> None:
        self._fitted = max(self._fitted, num_tokens)

    def lower(self, num_tokens: int) -> int:
        """So many did not fit: the largest piece that did, or half of these. Returns the new limit."""
        known = self._fitted if self._fitted < num_tokens else 0
        limit = max(known, num_tokens // 2)
        self.max_tokens, self._fitted, self._cut_steps = limit, known, 0
        return limit

    def take_back(self) -> None:
        """One request was to blame, and not the number of tokens: the limit is what it was when the step began."""
        self.max_tokens = self._at_step_start
