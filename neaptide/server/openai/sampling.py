"""Sampling parameters of a request body."""

from neaptide.engine.params import SamplingParams
from neaptide.server.context import ServingContext
from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.openai.schemas import GenerationBody


def sampling_params(
    body: GenerationBody, context: ServingContext, *, logprobs: int | None, echo: bool, grammar: str
) -> SamplingParams:
    """Sampling parameters for the engine; the model's defaults fill missing values.

    Args:
        logprobs: number of alternatives per token; None for no log-probabilities.
        echo: whether the answer repeats the prompt, with log-probabilities if requested.
        grammar: grammar of the answer; empty for none.

    Raises:
        InvalidRequestError: a token outside of the vocabulary, or more stop tokens than ``min_tokens`` can mask.
    """
    defaults = context.generation_defaults
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    top_k = defaults.top_k if body.top_k is None else max(0, body.top_k)
    if top_p == 0:
        temperature, top_p = 0.0, 1.0
    if any(token_id >= context.vocab_size for token_id in body.stop_token_ids):
        raise InvalidRequestError("A token id is outside the vocabulary.", param="stop_token_ids", code="invalid_value")
    _check_ends(body, context)
    return SamplingParams(
        min_tokens=body.min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=min(top_k, context.vocab_size),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        logit_bias=_logit_bias(body.logit_bias, context.vocab_size),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        grammar=grammar,
    )


def _check_ends(body: GenerationBody, context: ServingContext) -> None:
    """Raises InvalidRequestError if ``min_tokens`` has more stop tokens to mask than the executor can."""
    limit = context.max_masked_ends
    if not body.min_tokens or limit is None:
        return
    ends = {*body.stop_token_ids, *(() if body.ignore_eos else context.eos_token_ids)}
    if len(ends) > limit:
        raise InvalidRequestError(
            f"With min_tokens, at most {limit} stop tokens are possible, including the model's own; the request has "
            f"{len(ends)}.",
            param="stop_token_ids",
            code="invalid_value",
        )


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in bias.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= 10
        if not is_number or int(key) >= vocab_size:
            raise InvalidRequestError(
                "Keys must be token ids of the vocabulary.", param="logit_bias", code="invalid_value"
            )
        result[int(key)] = value
    return result
