"""Computes a step in pieces that fit into memory.

Activation memory grows with the tokens computed at once. Keys and values go to slots of their own, so a piece that ran
out of memory can be computed again in smaller pieces. A token reads the same keys and values whichever piece wrote
them.
"""

from typing import NamedTuple

import numpy as np
import torch

from neaptide.engine.arrays import IntArray
from neaptide.engine.steps.plan import StepPlan

MORE_AFTER_STEPS = 1000
"""After this many split steps the limit is doubled, because the memory may be free again. A failed try costs at most
one step's time."""
_SIGNS = (
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",
    "CUDA error: out of memory",  # the driver, on a launch
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Neither torch nor CUDA has one exception class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def free_cached(device: torch.device) -> None:
    """Frees torch's cached memory, so that pieces of other sizes can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Piece(NamedTuple):
    """Tokens of a step that are computed at once."""

    plan: StepPlan
    parts: IntArray
    """[parts of ``plan``] Indices of these parts in the step's plan."""

    @property
    def num_tokens(self) -> int:
        return int(self.plan.num_tokens.sum())


class Remainder:
    """The part of a step that is still to be computed, in the step's order: tokens that others read are written
    first."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self._left = plan.num_tokens.copy()

    def next_piece(self, max_tokens: int | None) -> Piece | None:
        """The first ``max_tokens`` tokens (None: all); None if nothing is left."""
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
        """Drops the rest of these parts."""
        self._left[parts] = 0


class TokenLimit:
    """The most tokens computed at once, learned from running out of memory."""

    def __init__(self) -> None:
        self.max_tokens: int | None = None
        """None if memory has never run out."""
        self._at_step_start: int | None = None
        self._fitted = 0
        """Tokens of the largest piece that was computed."""
        self._cut_steps = 0
        """Split steps since the limit last changed."""

    def begin_step(self, num_tokens: int) -> None:
        """Starts a step of ``num_tokens`` tokens."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            self._cut_steps += 1
            if self._cut_steps > MORE_AFTER_STEPS:
                self.max_tokens, self._cut_steps = 2 * self.max_tokens, 0
        self._at_step_start = self.max_tokens

    def fitted(self, num_tokens: int) -> None:
        self._fitted = max(self._fitted, num_tokens)

    def lower(self, num_tokens: int) -> int:
        """Lowers the limit after ``num_tokens`` did not fit: to the largest piece that did, or to half. Returns the new
        limit."""
        known = self._fitted if self._fitted < num_tokens else 0
        limit = max(known, num_tokens // 2)
        self.max_tokens, self._fitted, self._cut_steps = limit, known, 0
        return limit

    def take_back(self) -> None:
        """Restores the limit of the step's start, because one request failed and not the number of tokens."""
        self.max_tokens = self._at_step_start
