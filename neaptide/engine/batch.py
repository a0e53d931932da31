"""What passes between scheduler and executor: the plan of a step, its cost features, its result."""

from dataclasses import dataclass, field

import msgspec

from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import SamplingParams


@dataclass(slots=True)
class BatchShape:
    """Cost features of a step: running sums, so that adding a candidate is O(1).

    A request that computes one token on top of cached context counts as decode, anything else as prefill.
    """

    prefill_tokens: int = 0
    prefill_attention_pairs: int = 0
    """Sum over prefill chunks of (query, key) pairs: n*c + n*(n+1)/2 for n tokens on a context of c."""
    prefill_requests: int = 0
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """KV tokens read by decodes, summed."""
    max_context_tokens: int = 0
    shared_prefix_tokens: int = 0
    """KV tokens that several readers share and a kernel reads once (0 without such a kernel)."""
    swapped_blocks: int = 0
    prefill_context_tokens: int = 0
    """KV tokens that prefill chunks read: the context before them, summed."""
    prefill_masked_pairs: int = 0
    """n*(n-1)/2 for every chunk of n tokens behind context: pairs that a kernel without causal tiles computes as well,
    to throw them away."""
    longest_decode_tokens: int = 0
    """KV tokens that the longest decode reads."""

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_requests

    def add(self, num_tokens: int, context_tokens: int) -> None:
        """Adds a request that computes ``num_tokens`` on top of ``context_tokens`` already in the cache."""
        if num_tokens == 1 and context_tokens > 0:
            self.decode_requests += 1
            self.decode_context_tokens += context_tokens + 1
            if context_tokens >= self.longest_decode_tokens:
                self.longest_decode_tokens = context_tokens + 1
        else:
            self.prefill_requests += 1
            self.prefill_tokens += num_tokens
            self.prefill_context_tokens += context_tokens
            if context_tokens > 0:
                self.prefill_masked_pairs += num_tokens * (num_tokens - 1) // 2
            self.prefill_attention_pairs += num_tokens * context_tokens + num_tokens * (num_tokens + 1) // 2
        if context_tokens + num_tokens > self.max_context_tokens:
            self.max_context_tokens = context_tokens + num_tokens

    def plus(self, num_tokens: int, context_tokens: int) -> "BatchShape":
        """A copy with one more request."""
        other = self.copy()
        other.add(num_tokens, context_tokens)
        return other

    def plus_decodes(self, count: int, context_tokens: int) -> "BatchShape":
        """A copy with ``count`` more decodes that read ``context_tokens`` in all."""
        other = self.copy()
        other.decode_requests += count
        other.decode_context_tokens += context_tokens
        return other

    def copy(self) -> "BatchShape":
        return BatchShape(
            self.prefill_tokens,
            self.prefill_attention_pairs,
            self.prefill_requests,
            self.decode_requests,
            self.decode_context_tokens,
            self.max_context_tokens,
            self.shared_prefix_tokens,
            self.swapped_blocks,
            self.prefill_context_tokens,
            self.prefill_masked_pairs,
            self.longest_decode_tokens,
        )


class NewRequest(msgspec.Struct, frozen=True):
    """Sent with the first step that a request takes part in; the executor keeps it until the request ends."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part in a step. A Struct because a thousand are made for every step."""

    request_id: str
    token_ids: list[int]
    """The tokens to compute, at positions ``num_computed_tokens ...``. -1 is a placeholder: the token that this request
    samples in the step submitted before this one, whose result is not in yet; the executor fills it in."""
    num_computed_tokens: int
    """Tokens whose KV is in the cache before this step."""
    block_ids: list[int]
    """The request's whole block table; covers ``num_computed_tokens + len(token_ids)`` tokens."""
    sample: bool
    """Whether the last position's logits give a new token."""
    output_position: int
    """Index of that new token in the request's output (key of its random stream)."""


@dataclass(slots=True)
class StepPlan:
    """A step: who computes how many tokens, and where their KV goes. No tensors."""

    step: int
    scheduled: list[ScheduledRequest]
    shape: BatchShape
    new_requests: list[NewRequest] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    """Requests that ended since the last plan: the executor drops what it keeps of them."""
    predicted_s: float = 0.0
    margin_s: float = 0.0
    budget_s: float = 0.0


@dataclass(slots=True)
class StepResult:
    """What came out of a step."""

    token_ids: dict[str, int] = field(default_factory=dict)
    """The new token of every request that sampled."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """For requests that asked for them."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """For requests that asked for them: one entry per position p of this step with p + 1 < len(prompt),
    each scoring prompt token p + 1."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed on their own (for example non-finite logits); they have no token here."""
    prepare_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    is_whole: bool = True
    """False: the step had to be run in parts, so its time says nothing."""

    def merge(self, part: "StepResult") -> None:
        """Takes in the result of a part of the step."""
        self.token_ids |= part.token_ids
        self.logprobs |= part.logprobs
        self.prompt_logprobs |= part.prompt_logprobs
        self.errors |= part.errors
        self.prepare_s += part.prepare_s
        self.model_s += part.model_s
        self.sample_s += part.sample_s
