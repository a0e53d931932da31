"""What vLLM is told of sampling parameters of ours: all of it, for each case.

Read by the ordinary suite, with a class that only keeps what it is given, and inside vLLM's interpreter, with vLLM's.
"""

from typing import Any, NamedTuple

from neaptide.engine.params import SamplingParams


class Case(NamedTuple):
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    seed: int | None
    differs: dict[str, Any]
    """From ``PLAIN``."""

    @property
    def told(self) -> dict[str, Any]:
        return PLAIN | self.differs


PLAIN: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop_token_ids": [],
    "ignore_eos": True,
    "detokenize": False,
    "logprobs": None,
    "prompt_logprobs": None,
}
EVERYTHING = SamplingParams(
    max_tokens=9,
    min_tokens=3,
    temperature=0.7,
    top_p=0.6,
    top_k=5,
    min_p=0.1,
    presence_penalty=0.3,
    frequency_penalty=-0.4,
    repetition_penalty=1.2,
    logit_bias={7: 1.5, 8: -100.0},
    seed=21,
    stop_token_ids=(11, 12),
    logprobs=4,
    prompt_logprobs=2,
)
CASES = {
    "nothing": Case(SamplingParams(), (2,), None, {}),
    "everything": Case(
        EVERYTHING,
        (2, 3),
        99,
        {
            "temperature": 0.7,
            "top_p": 0.6,
            "top_k": 5,
            "min_p": 0.1,
            "presence_penalty": 0.3,
            "frequency_penalty": -0.4,
            "repetition_penalty": 1.2,
            "logit_bias": {7: 1.5, 8: -100.0},
            "seed": 99,
            "max_tokens": 9,
            "min_tokens": 3,
            "stop_token_ids": [11, 12, 2, 3],
            "logprobs": 4,
            "prompt_logprobs": 2,
        },
    ),
    "greedy": Case(SamplingParams(temperature=0.0), (2,), None, {"temperature": 0.0}),
    "the most likely alone": Case(SamplingParams(top_p=0.0), (2,), None, {"top_p": 1e-6}),
    "scores of the chosen alone": Case(
        SamplingParams(logprobs=0, prompt_logprobs=0), (2,), None, {"logprobs": 0, "prompt_logprobs": 0}
    ),
    "ends that are not held back": Case(SamplingParams(stop_token_ids=(5,)), (2,), None, {}),
    "an end of the model's that is none": Case(
        SamplingParams(min_tokens=2, stop_token_ids=(5,), ignore_eos=True),
        (2,),
        None,
        {"min_tokens": 2, "stop_token_ids": [5]},
    ),
    "a prompt alone": Case(
        SamplingParams(max_tokens=0, prompt_logprobs=1), (2,), None, {"max_tokens": 1, "prompt_logprobs": 1}
    ),
    "more tokens at least than at most": Case(
        SamplingParams(max_tokens=3, min_tokens=9),
        (2,),
        None,
        {"max_tokens": 3, "min_tokens": 3, "stop_token_ids": [2]},
    ),
    "a seed of 0": Case(SamplingParams(seed=0), (2,), 0, {"seed": 0}),
}
MOST_BIASES = 1024
"""That a request may have (``docs/api.md``)."""
