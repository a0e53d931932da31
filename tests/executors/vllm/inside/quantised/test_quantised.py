"""Quantised weights are read as what they stand for; that texts are vLLM's own is for ``test_same_as_llm.py``."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside.runs import NUM_OUTPUT, WEIGHTS, Run, prompts

pytestmark = pytest.mark.skipif(WEIGHTS is None, reason="weights are not quantised")


@torch.no_grad()
def test_most_tokens_are_those_of_the_weights_that_these_stand_for(
    checkpoint: tuple[Path, PreTrainedModel], started: StartedExecutor
) -> None:
    """Not all: inputs are rounded to eight bits or sixteen, and a tiny random model has many close calls."""
    run, asked, right = Run(started.executor), prompts(24, seed=22), 0
    for i, prompt in enumerate(asked):
        run.add(str(i), prompt)
    run.finish()
    for i, prompt in enumerate(asked):
        said = run.tokens[str(i)]
        logits = checkpoint[1](torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
        right += int((logits.argmax(-1) == torch.tensor(said)).sum())
    assert right >= 0.85 * NUM_OUTPUT * len(asked)
