"""As many biases as a request may have: a vocabulary that has so many tokens is wanted (NEAPTIDE_TEST_VOCAB)."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside.families import VOCAB
from tests.executors.vllm.inside.runs import Run, prompts
from tests.executors.vllm.inside.sampling.test_draws import logits_of, wrong_tokens
from tests.executors.vllm.sampling_cases import MOST_BIASES

Checkpoint = tuple[Path, PreTrainedModel]
pytestmark = pytest.mark.skipif(VOCAB <= MOST_BIASES, reason="the vocabulary has fewer tokens than biases")


def test_every_bias_counts(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    """The most likely tokens are pushed back, all that can be; beside others with as many and with none."""
    first, second, plain = prompts(3, seed=34)
    order = logits_of(checkpoint[1], first)[-1].argsort(descending=True).tolist()
    back = dict.fromkeys(order[:MOST_BIASES], -100.0)
    last = dict.fromkeys(range(6, 6 + MOST_BIASES - 1), -100.0) | {VOCAB - 1: 100.0}
    assert len(back) == len(last) == MOST_BIASES
    run = Run(started.executor)
    run.add("back", first, logit_bias=back)
    run.add("last", second, logit_bias=last)
    run.add("plain", plain)
    run.finish()
    assert run.tokens["back"][0] == order[MOST_BIASES]
    assert set(run.tokens["last"]) == {VOCAB - 1}
    for name, prompt, bias in (("back", first, back), ("last", second, last), ("plain", plain, {})):
        assert run.ends[name].error is None
        said = run.tokens[name]
        assert wrong_tokens(logits_of(checkpoint[1], prompt + said), prompt, said, bias) == 0


def test_one_less_is_seen(checkpoint: Checkpoint, started: StartedExecutor) -> None:
    """Of each end of the list that the runner is given."""
    (prompt,) = prompts(1, seed=35)
    order = logits_of(checkpoint[1], prompt)[-1].argsort(descending=True).tolist()
    back = dict.fromkeys(order[1:MOST_BIASES], -100.0)
    run = Run(started.executor)
    run.add("first", prompt, max_tokens=1, logit_bias={order[0]: -100.0} | back)
    run.add("last", prompt, max_tokens=1, logit_bias=back | {order[0]: -100.0})
    run.finish()
    assert run.tokens == {"first": [order[MOST_BIASES]], "last": [order[MOST_BIASES]]}
