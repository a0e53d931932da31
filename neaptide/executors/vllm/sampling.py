"""Sampling parameters in vLLM's form. ``docs/vllm.md`` lists the differences from our own sampler."""

import hashlib
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams as VllmSamplingParams

from neaptide.engine.params import SamplingParams

_LEAST_TOP_P = 1e-6
"""vLLM rejects 0, which for us keeps only the most likely token."""


def draw_seed(seed: int | str, position: int = -1) -> int:
    """Seed for sampling at an output position of a request, from its seed, or from its id if it has none."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=7).digest(), "little")


def is_random(params: SamplingParams) -> bool:
    return params.temperature > 0.0


def to_vllm(params: SamplingParams, eos_token_ids: Sequence[int], seed: int | None) -> Any:
    """Converts the parameters.

    Args:
        seed: None draws from the stream that all requests share.
    """
    # Neaptide handles stops; vLLM needs them only for the ``min_tokens`` mask.
    eos = () if params.ignore_eos else eos_token_ids
    masked = [*params.stop_token_ids, *eos] if params.min_tokens else []
    max_tokens = max(params.max_tokens, 1)
    return VllmSamplingParams(
        temperature=params.temperature,
        top_p=max(params.top_p, _LEAST_TOP_P),
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        stop_token_ids=masked,
        ignore_eos=True,
        detokenize=False,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
