"""The other families' text and log-probabilities against transformers, by torch and by the kernels in C."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from neaptide.models.checkpoint import load_model_config
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
PADDED: dict[str, Any] = {"pad_token_id": 0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "rms_norm_eps": 0.1,  # so large that it matters where it is added
}
HEADS_OF_16 = {"head_dim": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3": ("qwen3", HEADS_OF_16),
    "qwen3-biases-tied": ("qwen3", {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", MISTRAL),
    "mistral-tied": ("mistral", MISTRAL | {"head_dim": 10, "tie_word_embeddings": True}),
    "phi3": ("phi3", PADDED | {"tie_word_embeddings": True}),
    "phi3-partial": ("phi3", PADDED | {"rope_parameters": PARTIAL}),
    "internlm3": ("internlm3", HEADS_OF_16 | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", PADDED | {"num_hidden_layers": 4}),
    "smollm3-untied": ("smollm3", PADDED | {"no_rope_layers": [0, 1], "tie_word_embeddings": False}),
    "granite": ("granite", GRANITE),
    "granite-tied-biases": (
        "granite",
        GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "hyperclovax": ("hyperclovax", GRANITE),
    "hyperclovax-norms-before": ("hyperclovax", {"use_post_norm": False, "tie_word_embeddings": True}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4-window": (
        "exaone4",
        {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
    ),
    "hunyuan": ("hunyuan_v1_dense", HEADS_OF_16 | {"tie_word_embeddings": True}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        HEADS_OF_16 | {"rope_parameters": {"rope_type": "dynamic", "alpha": 1e3, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "ernie": ("ernie4_5", HEADS_OF_16),
    "ernie-biases-untied": ("ernie4_5", {"head_dim": 10, "use_bias": True, "tie_word_embeddings": False}),
    "helium": ("helium", {"head_dim": 8, "attention_bias": True}),
    "glm": ("glm", PADDED | HEADS_OF_16),
    "glm4": ("glm4", PADDED | {"head_dim": 12, "tie_word_embeddings": True}),
    "seed-oss": ("seed_oss", HEADS_OF_16),
    "arcee": ("arcee", {}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-in-series": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    "phi": ("phi", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-without-biases": ("starcoder2", {"use_bias": False, "sliding_window": 128}),
    "nemotron": ("nemotron", HEADS_OF_16),
    "cohere": ("cohere", PADDED),
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


def test_the_cache_has_as_many_bytes_a_token_as_that_of_transformers(written: Written) -> None:
    """The scheduler counts blocks and predicts their reads with this number."""
    config = load_model_config(written.directory)
    cache = written.model(torch.tensor([[5]])).past_key_values
    expected = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert config.kv_bytes_per_token(torch.float32.itemsize) == expected


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "mistral", "opt", "granite", "olmo2", "gpt-neox", "hunyuan"])
def test_bf16_within_tolerance(variant: str, tmp_path: Path) -> None:
    family, fields = VARIANTS[variant]
    model = write_family(family, tmp_path, spread=0.1, **fields)
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
        ("gpt2", "transformer.wpe.weight"),
        ("phi", "lm_head.bias"),
        ("cohere", "model.layers.1.input_layernorm.weight"),
    ],
)
def test_what_a_family_needs_is_missed(family: str, missing: str, tmp_path: Path) -> None:
    write_family(family, tmp_path, **PADDED)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"the checkpoint lacks {missing}"):
        make_executor(tmp_path)


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As GPT-2's own checkpoint: no prefix, and the causal mask of each layer."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return found | {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}


def with_masks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Pythia's checkpoints: derived tensors of each layer."""
    attention = "gpt_neox.layers.0.attention"
    masks = {f"{attention}.bias": torch.ones(8, 8, dtype=torch.bool), f"{attention}.masked_bias": torch.ones(())}
    return tensors | masks | {f"{attention}.rotary_emb.inv_freq": torch.ones(4)}


def with_new_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output projection under the name of today's transformers."""
    return {name.replace("embed_out.", "lm_head."): tensor for name, tensor in tensors.items()}


def with_tied_copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A projection that a tied model does not use."""
    return tensors | {"lm_head.weight": torch.zeros(VOCAB, 48)}


@pytest.mark.parametrize(
    ("family", "change"),
    [("gpt2", without_prefix), ("gpt_neox", with_masks), ("gpt_neox", with_new_name), ("starcoder2", with_tied_copy)],
)
def test_names_of_tensors_as_they_are_on_the_hub(
    family: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    model = write_family(family, tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(change({name: tensor.contiguous() for name, tensor in load_file(path).items()}), path)
    driver = Driver(make_executor(tmp_path))
    driver.add("r", random_prompt(20, 1), EVERY_LOGPROB)
    driver.run(4)
    assert_logprobs(model, driver)


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
