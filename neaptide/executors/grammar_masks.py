"""Which tokens each request's grammar allows next: filled on the host while the device runs the forward pass."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from neaptide.engine.arrays import TokenArray
from neaptide.engine.params import GRAMMAR_ERROR
from neaptide.engine.steps.plan import StepPlan
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID
from neaptide.executors.recent_tokens import RecentTokens, SampledLater
from neaptide.models.grammars import GrammarError, Grammars

logger = logging.getLogger(__name__)

MAX_THREADS = 8
"""Of one step's masks: on a machine whose GPU computes, the host's cores have time."""
_NO_TOKENS: TokenArray = np.zeros(0, np.int32)


class Follower:
    """Where one request's output stands in its grammar. Used by the mask thread only.

    It is told the whole output at every step and not the last token: after a preemption, a step that was undone or one
    that is run again in parts, the output may be shorter than it was, or another. Then it is read again from the start.
    """

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self._matcher: LLMatcher | None = None
        self._followed = _NO_TOKENS

    def follow(self, output: TokenArray, grammars: Grammars) -> LLMatcher:
        """The matcher behind these tokens.

        Raises:
            GrammarError: the grammar does not allow them, or has become too complex.
        """
        matcher, known = self._matcher, self._followed
        if matcher is None or not np.array_equal(known, output[: len(known)]):
            matcher, known = grammars.start(self.grammar), _NO_TOKENS
        self._matcher = None  # a matcher that fails is of no use any more
        for token_id in output[len(known) :].tolist():
            if not matcher.consume_token(token_id):
                raise GrammarError(matcher.get_error())
        self._matcher, self._followed = matcher, output
        return matcher


@dataclass(slots=True)
class Constrained:
    """A request that samples in a step and has a grammar."""

    request_id: str
    follower: Follower
    output: TokenArray
    """[output tokens so far] of its own; the last may be a placeholder."""
    last: SampledLater | None
    """Where the token is that the placeholder stands for."""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        part: int,
        follower: Follower,
        num_prompt_tokens: int,
        recent: RecentTokens[Any],
    ) -> "Constrained":
        """A part of a plan that samples."""
        position = int(plan.output_position[part])
        # A copy: when it is read, the row may be another's.
        output = plan.table.tokens[plan.rows[part], num_prompt_tokens : num_prompt_tokens + position].copy()
        return cls(plan.request_ids[part], follower, output, recent.at(position - 1))

    @property
    def waits(self) -> bool:
        """An earlier step still samples the last token."""
        return self.last is not None and len(self.output) > 0 and self.output[-1] == PLACEHOLDER_TOKEN_ID

    def tokens(self) -> TokenArray:
        """Waits for the step that samples the last one."""
        if self.waits and self.last is not None:
            self.output[-1] = self.last.wait()
        return self.output


@dataclass(slots=True)
class StepMask:
    """What a step's grammars allow."""

    bits: npt.NDArray[np.int32]
    """[constrained requests, ceil(vocabulary / 32)]: token t is bit t % 32 of word t // 32."""
    request_ids: list[str]
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed on their own; their bits are all set."""


class GrammarMasks:
    """Fills masks in a thread of its own.

    Args:
        directory: of the model.
        num_threads: that fill a step's masks; 0 is as many as make sense.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 0) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_threads = num_threads or max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._grammars: Grammars | None = None
        self._filler: LLExecutor | None = None

    def warm_up(self) -> None:
        """Reads the tokenizer now, where there is one, and not when the first grammar comes."""
        try:
            self._thread.submit(self._load).result()
        except GrammarError as error:
            logger.info("no structured output: %s", error)

    def compile(self, follower: Follower) -> None:
        """Begins to compile the grammar of a new request, beside the steps that compute its prompt."""
        self._thread.submit(self._compile, follower)

    def fill(self, constrained: list[Constrained]) -> "Future[StepMask]":
        """Begins to fill a step's masks."""
        return self._thread.submit(self._fill, constrained)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- in the thread ----

    def _load(self) -> Grammars:
        if self._grammars is None:
            self._grammars = Grammars(self._directory, self._vocab_size, self._eos_token_ids)
        return self._grammars

    def _compile(self, follower: Follower) -> None:
        try:
            follower.follow(_NO_TOKENS, self._load())
        except GrammarError:
            logger.info("a grammar cannot be compiled")  # ``_fill`` tells whose

    def _fill(self, constrained: list[Constrained]) -> StepMask:
        bits = np.full((len(constrained), -(-self._vocab_size // 32)), -1, np.int32)
        mask = StepMask(bits, [request.request_id for request in constrained])
        matchers: list[tuple[LLMatcher, int]] = []
        for index, request in enumerate(constrained):
            try:
                matchers.append((request.follower.follow(request.tokens(), self._load()), index))
            except Exception:
                self._give_up(mask, index)
        if matchers:
            if self._filler is None:
                self._filler = LLExecutor(num_threads=self._num_threads)
            self._filler.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.shape[1] * 4, len(bits))
        for matcher, index in matchers:
            if matcher.is_error() or not bits[index].any():
                self._give_up(mask, index)
        return mask

    @staticmethod
    def _give_up(mask: StepMask, index: int) -> None:
        """Nothing of the library's words is logged: they quote the grammar, and that is the caller's."""
        logger.warning("request %s: its grammar cannot be followed any further", mask.request_ids[index])
        mask.errors[mask.request_ids[index]] = GRAMMAR_ERROR
        mask.bits[index] = -1
