"""A batch line's body becomes what the same body would become online."""

from typing import Any

import pytest

from neaptide.engine.params import SamplingParams, Tier
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.openai.endpoints import CHAT, COMPLETIONS
from neaptide.server.openai.prepare import prepare
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import USER, make_context

SAMPLING = {
    "max_tokens": 8,
    "min_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.6,
    "top_k": 5,
    "min_p": 0.05,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.2,
    "logit_bias": {"9": 3.5},
    "seed": 11,
    "stop_token_ids": [12],
    "ignore_eos": True,
}


def test_every_sampling_parameter_of_a_line_reaches_the_engine(tokenizer: Tokenizer) -> None:
    compiled = ContextCompiler(make_context(tokenizer)).compile(CHAT, {"messages": USER, **SAMPLING})
    assert compiled.params == [
        SamplingParams(
            max_tokens=8,
            min_tokens=2,
            temperature=0.7,
            top_p=0.6,
            top_k=5,
            min_p=0.05,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            repetition_penalty=1.2,
            logit_bias={9: 3.5},
            seed=11,
            stop_token_ids=(12,),
            ignore_eos=True,
        )
    ]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": USER, "n": 3, "logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True, "stop": "x"}),
    ],
)
def test_a_line_compiles_to_what_the_online_request_is(
    tokenizer: Tokenizer, endpoint: str, body: dict[str, Any]
) -> None:
    context, body = make_context(tokenizer), {**body, **SAMPLING}
    online = prepare(endpoint, body, context, Tier.DEFAULT)
    compiled = ContextCompiler(context).compile(endpoint, body)
    assert compiled.prompts == online.requests
    assert compiled.params == [online.params_for(choice) for choice in range(online.num_choices)]
    assert compiled.wants_stream == bool(online.stop)
