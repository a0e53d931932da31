"""The executor's text and log-probabilities against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from neaptide.engine.params import SamplingParams
from tests.executors.driver import (
    EVERY_LOGPROB,
    Driver,
    assert_greedy,
    assert_logprobs,
    make_executor,
    random_prompt,
    write_checkpoint,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head-dim": {"head_dim": 10},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_transformers(variant: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, **VARIANTS[variant])
    driver = Driver(make_executor(tmp_path))
    for index, length in enumerate((1, 5, 16, 70)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(12, chunk=17)
    assert_logprobs(model, driver)
    assert sum(assert_greedy(model, track) for track in driver.tracks.values()) > 30


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    driver = Driver(make_executor(tmp_path))
    driver.add("a", random_prompt(20, 1), EVERY_LOGPROB)
    driver.run(4)
    assert_logprobs(model, driver)


def test_alone_equals_generate(gqa: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = gqa
    driver = Driver(make_executor(directory))
    track = driver.add("a", random_prompt(30, 3))
    driver.run(24)
    generated = model.generate(
        torch.tensor([track.prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    compared = assert_greedy(model, track)
    assert compared > 12
    assert track.output[:compared] == generated[0, 30 : 30 + compared].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 16, 17])
def test_chunked_prefill(chunk: int, gqa: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = gqa
    driver = Driver(make_executor(directory))
    for index, length in enumerate((2, 31, 48, 65)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(5, chunk=chunk)
    assert_logprobs(model, driver)
    for track in driver.tracks.values():
        assert_greedy(model, track)


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_block_sizes(block_size: int, gqa: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = gqa
    driver = Driver(make_executor(directory, block_size=block_size, num_blocks=200), block_size)
    for index, length in enumerate((7, 33, 64)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(6, chunk=9)
    assert_logprobs(model, driver)


def test_shared_prefix_blocks(gqa: tuple[Path, LlamaForCausalLM]) -> None:
    """Two readers of one request's full blocks, beside it and after it has ended."""
    directory, model = gqa
    driver = Driver(make_executor(directory))
    prefix = random_prompt(48, 1)
    first = driver.add("first", prefix + random_prompt(5, 2))
    driver.run(1)
    shared = first.blocks[:3]
    second = driver.add("second", prefix + random_prompt(9, 3), shared=shared)
    third = driver.add("third", prefix + random_prompt(1, 4), shared=shared)
    driver.run(10)
    for track in (first, second, third):
        assert assert_greedy(model, track) > 3


def test_reused_blocks_hold_nothing_back(gqa: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = gqa
    driver = Driver(make_executor(directory, num_blocks=6))
    for index in range(6):
        track = driver.add(f"r{index}", random_prompt(40 - 3 * index, index))
        driver.run(8)
        assert_greedy(model, track)
        driver.finish(f"r{index}")


def test_mixed_steps(gqa: tuple[Path, LlamaForCausalLM]) -> None:
    """Decodes, first chunks and later chunks in one step, in any order."""
    directory, model = gqa
    driver = Driver(make_executor(directory))
    driver.add("decoding", random_prompt(20, 0))
    driver.step({"decoding": 20})
    driver.add("second-chunk", random_prompt(40, 1))
    driver.step({"second-chunk": 19, "decoding": 1})
    driver.add("first-chunk", random_prompt(11, 2))
    driver.add("one-token", random_prompt(1, 3))
    driver.step({"first-chunk": 11, "decoding": 1, "second-chunk": 21, "one-token": 1})
    driver.run(6)
    for track in driver.tracks.values():
        assert_greedy(model, track)


def test_bf16_within_tolerance(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, spread=0.1)
    driver = Driver(make_executor(tmp_path, dtype="bfloat16"))
    for index, length in enumerate((3, 21, 50)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(4, chunk=20)
    assert_logprobs(model, driver, tolerance=0.1)


def test_preempted_request_is_recomputed(gqa: tuple[Path, LlamaForCausalLM]) -> None:
    driver = Driver(make_executor(gqa[0]))
    penalised = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.5)
    uninterrupted = driver.add("a", random_prompt(20, 1), penalised)
    driver.run(12)
    preempted = driver.add("b", random_prompt(20, 1), penalised)
    driver.run(5)
    preempted.blocks, preempted.computed = [], 0  # all its KV is gone; output tokens come by again
    driver.run(12, chunk=7)
    assert preempted.output == uninterrupted.output
