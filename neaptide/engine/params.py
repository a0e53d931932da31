"""What a caller may ask of one request: its tier, its sampling, and how it may end."""

from enum import IntEnum, StrEnum

import msgspec


class Tier(StrEnum):
    """Service tier of a request; also the only values of the metric label ``tier``."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"
    BATCH = "batch"


class RequestClass(IntEnum):
    """ONLINE work has latency targets; OFFLINE work takes what is left."""

    ONLINE = 0
    OFFLINE = 1


def request_class(tier: Tier) -> RequestClass:
    return RequestClass.ONLINE if tier in (Tier.PRIORITY, Tier.DEFAULT) else RequestClass.OFFLINE


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


NUMERICAL_ERROR = "numerical_error"
"""The model's logits for this request were not finite."""
INVALID_TOKEN = "invalid_token"  # noqa: S105
"""A token id outside the vocabulary got past the edge."""
INTERNAL_ERROR = "internal_error"
"""The engine raised while it worked on this request."""
OUT_OF_MEMORY = "out_of_memory"
"""The device's memory does not hold what a single token of this request takes."""
GRAMMAR_ERROR = "grammar_error"
"""The grammar that this request's output has to follow could not be followed any further."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to pick tokens and when to stop.

    Values are checked at the edge (``neaptide.server.openai.schemas``); the engine trusts them.
    Stop *strings* are not here: text never enters the engine, the detokenizer watches for them
    and aborts the request with reason ``stop``.
    """

    max_tokens: int = 16
    """Output tokens at most; 0 computes (and scores) the prompt only."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """The random stream of a request depends on (seed, output position) only."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the output, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Top-k log-probabilities for each output token; 0 gives the chosen token's alone."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens 1..n-1 (token 0 has no condition)."""
    grammar: str = ""
    """What the output has to follow, as ``neaptide.models.grammars`` reads it: the edge has compiled it, so that it is
    known to be one. Empty allows any output."""
