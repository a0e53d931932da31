"""The executor's state of a request between its first step and its end."""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID
from neaptide.executors.grammar_places import Follower
from neaptide.executors.recent_tokens import RecentTokens
from neaptide.executors.torch.placeholders import SampledRow
from neaptide.executors.torch.sampling.random_stream import request_seed

FIRST_SLOTS = 16
"""Initial capacity for an output's distinct tokens; it doubles when full."""


class RequestState:
    """Sampling parameters of a request, and its token counts if they are needed."""

    def __init__(self, request: NewRequest, eos_token_ids: tuple[int, ...], engine_seed: int):
        params = request.params
        self.params: SamplingParams = params
        self.prompt_token_ids = request.prompt_token_ids
        self.seed = params.seed if params.seed is not None else request_seed(engine_seed, request.request_id)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self.masked_ids = sorted(ends) if params.min_tokens > 0 else []
        """Tokens that may not be sampled before ``min_tokens``."""
        self.needs_counts = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        self._slots: dict[int, int] = {}
        """Index of each output token in the arrays below."""
        self._output_tokens = np.zeros(FIRST_SLOTS, np.int64)
        self._output_counts = np.zeros(FIRST_SLOTS, np.float32)
        self.output_len = 0
        self._seen: npt.NDArray[np.int64] | None = None
        self._num_outputs_seen = 0
        self.recent_tokens: RecentTokens[SampledRow] = RecentTokens()
        self.follower = Follower(params.grammar) if params.grammar else None
        self.late_position = -1
        """Output position whose mask was late. Tokens sampled from there on are dropped."""

    @property
    def output_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The output's distinct tokens and their counts, for penalties."""
        return self._output_tokens[: len(self._slots)], self._output_counts[: len(self._slots)]

    @cached_property
    def biases(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids, and the biases added to their logits."""
        bias = self.params.logit_bias
        return np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    @cached_property
    def mask(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Like ``biases``, for tokens that may not be sampled before ``min_tokens``."""
        return np.array(self.masked_ids, np.int64), np.full(len(self.masked_ids), -np.inf, np.float32)

    @cached_property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """The prompt's distinct tokens, ascending."""
        return np.flatnonzero(np.bincount(np.array(self.prompt_token_ids, dtype=np.int64)))

    def seen_tokens(self) -> npt.NDArray[np.int64]:
        """The distinct tokens of prompt and output, extended by the new ones of each step."""
        seen = self.prompt_tokens if self._seen is None else self._seen
        new = self.output_counts[0][self._num_outputs_seen :]
        if len(new):
            places = np.searchsorted(self.prompt_tokens, new)
            known = np.append(self.prompt_tokens, -1)[places] == new
            seen = self._seen = np.concatenate((seen, new[~known]))
            self._num_outputs_seen += len(new)
        return seen

    def observe(self, token_ids: list[int], start: int) -> None:
        """Counts output tokens when the model computes them, before the next one is sampled.

        Tokens recomputed after a preemption are not counted again.

        Args:
            token_ids: computed in this step, from position ``start`` of prompt and output on.

        Raises:
            ValueError: output tokens were skipped.
        """
        seen = len(self.prompt_token_ids) + self.output_len
        if start > seen:
            raise ValueError(f"output tokens before {start} were skipped")
        new = token_ids[max(0, seen - start) :]
        for position, token in enumerate(new, self.output_len):
            if token == PLACEHOLDER_TOKEN_ID and (sampled := self.recent_tokens.at(position)) is not None:
                token = sampled.wait()
            self._count(token)
        self.output_len += len(new)

    def _count(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._output_tokens):
            self._output_tokens = np.concatenate((self._output_tokens, np.zeros_like(self._output_tokens)))
            self._output_counts = np.concatenate((self._output_counts, np.zeros_like(self._output_counts)))
        self._output_tokens[slot] = token
        self._output_counts[slot] += 1
