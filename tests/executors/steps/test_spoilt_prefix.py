"""NaN at one token of a chunk reaches the blocks before it, which others share: they are computed again."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.params import NUMERICAL_ERROR
from neaptide.kernels.native import COMPILERS
from tests.executors.driver import make_executor, random_prompt
from tests.executors.engine_run import EngineRun

BLOCK_SIZE, PREFIX_TOKENS = 8, 72
"""An item of the attention in C has 16 tokens of this model: the one behind the prefix stands in one with its end."""


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kernels", ["torch", *(["native"] if any(map(shutil.which, COMPILERS)) else [])])
def test_the_innocent_are_computed_again(gqa: tuple[Path, LlamaForCausalLM], kernels: str, depth: int) -> None:
    executor = make_executor(gqa[0], num_blocks=64, block_size=BLOCK_SIZE, cpu_kernels=kernels)
    with torch.inference_mode():
        executor._runner.model.embedding[0] = float("nan")
    limits = SchedulerConfig(max_model_len=256, overlap_depth=depth, max_num_batched_tokens=100)
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK_SIZE), scheduler=limits)
    prefix, rest = random_prompt(PREFIX_TOKENS, 1), random_prompt(120, 2)
    innocent, alone = [*prefix, *random_prompt(5, 3)], {}
    for with_bad in (False, True):
        run = EngineRun(config, executor, may_fail=True)
        if with_bad:
            run.add("bad", [*prefix, 0, *rest])
            run.step()
        run.add("innocent", innocent)
        run.finish()
        end = run.ends["innocent"]
        assert (end.error, end.num_preemptions) == (None, int(with_bad))
        alone = alone or run.tokens
    assert run.ends["bad"].error == NUMERICAL_ERROR
    assert run.tokens["innocent"] == alone["innocent"]
