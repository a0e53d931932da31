"""The other families' text and log-probabilities against transformers, by torch and by the kernels in C."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from neaptide.models.config import UnsupportedModelError
from tests.executors.driver import (
    EVERY_LOGPROB,
    VOCAB,
    Driver,
    assert_greedy,
    assert_logprobs,
    make_executor,
    random_prompt,
    reference_logits,
    write_family,
)

MISTRAL = {"sliding_window": None}
PHI3: dict[str, Any] = {"pad_token_id": 0, "tie_word_embeddings": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-tied": ("qwen3", {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", MISTRAL),
    "phi3": ("phi3", PHI3),
    "phi3-partial": (
        "phi3",
        PHI3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "mistral-tied": ("mistral", MISTRAL | {"head_dim": 10, "tie_word_embeddings": True}),
    "opt": ("opt", {}),
    "opt-untied-without-biases": ("opt", {"tie_word_embeddings": False, "enable_bias": False}),
    "opt-norms-behind": ("opt", {"do_layer_norm_before": False, "tie_word_embeddings": False}),
    "opt-without-last-norm": ("opt", {"_remove_final_layer_norm": True}),
}


class Written(NamedTuple):
    directory: Path
    model: PreTrainedModel


@pytest.fixture(scope="module", params=VARIANTS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    family, fields = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    return Written(directory, write_family(family, directory, **fields))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_chunks_prefix_hits_and_preemption(kernels: str, written: Written) -> None:
    driver = Driver(make_executor(written.directory, cpu_kernels=kernels))
    for index, length in enumerate((1, 16, 70)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(3, chunk=17)
    shared = driver.tracks["r2"].blocks[:4]
    prefix = driver.tracks["r2"].prompt[:64]
    for index in range(2):  # beside their owner: in C they read the prefix together
        driver.add(f"hit{index}", prefix + random_prompt(1 + 5 * index, 7 + index), EVERY_LOGPROB, shared=shared)
    driver.run(6)
    preempted = driver.tracks["r1"]
    preempted.blocks, preempted.computed = [], 0
    preempted.prompt_logprobs = []  # they come by again
    driver.run(10, chunk=9)
    assert_logprobs(written.model, driver)
    assert sum(assert_greedy(written.model, track) for track in driver.tracks.values()) > 35


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "opt"])
def test_bf16_within_tolerance(family: str, tmp_path: Path) -> None:
    model = write_family(family, tmp_path, spread=0.1, **(MISTRAL if family == "mistral" else {}))
    driver = Driver(make_executor(tmp_path, dtype="bfloat16"))
    for index, length in enumerate((3, 21, 50)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(4, chunk=20)
    assert_logprobs(model, driver, tolerance=0.1)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    """Up to its length it changes nothing; a token more would, which the reference shows."""
    window_tokens = 40
    model = write_family("mistral", tmp_path, sliding_window=window_tokens)
    executor = make_executor(tmp_path)
    assert executor.model_config.max_position_embeddings == window_tokens
    driver = Driver(executor)
    driver.add("r", random_prompt(30, 1), EVERY_LOGPROB)
    driver.run(10)
    assert_logprobs(model, driver)
    assert len(driver.tracks["r"].tokens) == window_tokens
    longer = torch.tensor([random_prompt(window_tokens + 1, 2)])
    windowed = model(longer).logits[0, -1]
    model.config.sliding_window = None
    whole = model(longer).logits[0, -1]
    assert (windowed - whole).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("opt", "model.decoder.layers.0.final_layer_norm.bias"),
    ],
)
def test_what_a_family_needs_is_missed(family: str, missing: str, tmp_path: Path) -> None:
    write_family(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"the checkpoint lacks {missing}"):
        make_executor(tmp_path)


def test_biases_that_mistral_has_none_of_are_refused(tmp_path: Path) -> None:
    write_family("mistral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        make_executor(tmp_path)


def test_the_last_position_of_a_table_can_be_used(tmp_path: Path) -> None:
    model = write_family("opt", tmp_path, max_position_embeddings=24)
    driver = Driver(make_executor(tmp_path))
    driver.add("r", random_prompt(20, 1), EVERY_LOGPROB)
    driver.run(5)  # the fifth token is sampled at the last position
    track = driver.tracks["r"]
    assert track.computed == 24
    expected = torch.log_softmax(reference_logits(model, track.tokens[:24])[-1], dim=-1)
    got = torch.empty(VOCAB)
    got[track.logprobs[4].top_ids] = torch.tensor(track.logprobs[4].top_logprobs)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
