"""The whole engine in both dtypes, whatever this machine's ``auto`` is: chunked, on cached prefixes, after preemption.

The reference computes in fp32 from the same bf16 weights; the gap rule has a bound for each dtype.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from neaptide.engine.params import Tier
from tests.engine.test_core_against_transformers import Run, prompts
from tests.executors.driver import GAPS, leading_agreement, write_bfloat16_checkpoint

Checkpoint = tuple[Path, LlamaForCausalLM]
NUM_TOKENS = 12

pytestmark = pytest.mark.parametrize("dtype", GAPS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("bfloat16")
    return directory, write_bfloat16_checkpoint(directory)


def assert_texts(
    model: LlamaForCausalLM, asked: Mapping[str, Sequence[int]], tokens: Mapping[str, list[int]], dtype: str
) -> None:
    """By the gap rule, which must leave at least half of the tokens to compare."""
    compared = sum(leading_agreement(model, prompt, tokens[name], GAPS[dtype]) for name, prompt in asked.items())
    assert all(len(tokens[name]) == NUM_TOKENS for name in asked)
    assert compared >= NUM_TOKENS * len(asked) / 2


@pytest.mark.parametrize("max_tokens_per_step", [5, 200])
def test_prompts_in_chunks_and_whole(checkpoint: Checkpoint, dtype: str, max_tokens_per_step: int) -> None:
    directory, model = checkpoint
    asked = {f"r{i}": prompt for i, prompt in enumerate(prompts(8, seed=2))}
    run = Run(directory, dtype=dtype, max_num_batched_tokens=max_tokens_per_step)
    for name, prompt in asked.items():
        run.add(name, prompt)
    run.finish()
    assert_texts(model, asked, run.tokens, dtype)


def test_on_a_cached_prefix(checkpoint: Checkpoint, dtype: str) -> None:
    directory, model = checkpoint
    prefix = prompts(1, seed=4, low=30, high=31)[0]
    asked = {f"r{i}": prefix + tail for i, tail in enumerate(prompts(6, seed=5, low=1, high=9))}
    run = Run(directory, dtype=dtype)
    for name, prompt in asked.items():
        run.add(name, prompt)
        run.step()  # its prompt is in the cache before the next arrives
    run.finish()
    assert [run.ends[name].num_cached_tokens for name in asked] == [0, 28, 28, 28, 28, 28]
    assert_texts(model, asked, run.tokens, dtype)


def test_after_preemption(checkpoint: Checkpoint, dtype: str) -> None:
    directory, model = checkpoint
    run = Run(directory, num_blocks=24, dtype=dtype, max_num_batched_tokens=40)
    offline = {f"f{i}": prompt for i, prompt in enumerate(prompts(6, seed=6, low=10, high=25))}
    online = {f"a{i}": prompt for i, prompt in enumerate(prompts(6, seed=7, low=10, high=25))}
    for name, prompt in offline.items():
        run.add(name, prompt, Tier.FLEX)
    for name, prompt in online.items():
        for _ in range(3):
            run.step()
        run.add(name, prompt)
    run.finish()
    assert any(end.num_preemptions for end in run.ends.values())
    assert_texts(model, offline | online, run.tokens, dtype)
