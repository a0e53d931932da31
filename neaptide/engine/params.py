"""Parameters of one request: its tier, its sampling, and how it may end."""

from enum import IntEnum, StrEnum

import msgspec


class Tier(StrEnum):
    """Service tier of a request; also the only values of the metric label ``tier``."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"
    BATCH = "batch"


class RequestClass(IntEnum):
    """Scheduling class. ONLINE work has latency targets; OFFLINE work takes the capacity that is left."""

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
"""A token id outside the vocabulary passed the server's checks."""
INTERNAL_ERROR = "internal_error"
"""The engine raised an exception while it processed this request."""
OUT_OF_MEMORY = "out_of_memory"
"""The device's memory cannot hold what a single token of this request needs."""
GRAMMAR_ERROR = "grammar_error"
"""This request's output could not be matched to its grammar any more."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to pick tokens and when to stop.

    The server checks the values (``neaptide.server.openai.schemas``); the engine trusts them. Stop *strings* are not
    here, because text never enters the engine. The detokenizer finds them and aborts the request with reason ``stop``.
    """

    max_tokens: int = 16
    """Most output tokens; 0 computes (and scores) the prompt only."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are masked before this many output tokens."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 turns this off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """Seed of the request's random stream, which depends on (seed, output position) only."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, in addition to the model's end-of-sequence ids."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of top log-probabilities for each output token; 0 gives the chosen token's alone."""
    prompt_logprobs: int | None = None
    """Number of top log-probabilities for prompt tokens 1..n-1 (token 0 has no condition)."""
    grammar: str = ""
    """Grammar of the output, as ``neaptide.models.grammars`` reads it. The server has compiled it, so it is valid.
    Empty allows any output."""
