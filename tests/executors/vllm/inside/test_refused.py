"""Models that a plan of ours cannot drive, or that would run code of their own, are refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BertConfig, FalconH1Config, MambaConfig, PreTrainedConfig, Qwen2AudioConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.executors.registry import start_executor
from neaptide.executors.vllm.refusals import refuse_cache
from neaptide.models.config import UnsupportedModelError
from tests.executors.vllm.inside.families import CONFIGS, bring_own_code
from tests.executors.vllm.inside.runs import LIMITS


def start(directory: Path, block_size: int = 32) -> None:
    config = EngineConfig(
        cache=CacheConfig(num_blocks=48, block_size=block_size),
        scheduler=SchedulerConfig(**LIMITS),
        executor=ExecutorConfig(kind="vllm", model_path=str(directory), dtype="float32", num_threads=1),
    )
    start_executor(config, MonotonicClock())


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("Qwen2AudioForConditionalGeneration", Qwen2AudioConfig(), "it is multimodal"),
        ("BertModel", BertConfig(), "it generates no text"),
        ("BartForConditionalGeneration", BartConfig(), "it has an encoder"),
        ("MambaForCausalLM", MambaConfig(max_position_embeddings=512), "it has layers without attention"),
        ("FalconH1ForCausalLM", FalconH1Config(), "it has layers without attention"),
    ],
)
def test_kinds_that_are_not_served(architecture: str, config: PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as refused:
        start(tmp_path)
    assert str(refused.value) == f"{tmp_path}: the vllm executor does not serve this model: {reason}"


def test_a_model_that_needs_its_own_code(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    bring_own_code(tmp_path, model_type="own", architectures=["OwnModel"])
    with pytest.raises(UnsupportedModelError, match=r"this vLLM does not know the model; .* which is never run$"):
        start(tmp_path)


def test_a_family_that_vllm_does_not_know_is_told_in_few_words(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    bring_own_code(tmp_path, architectures=["NoSuchModelForCausalLM"])
    with pytest.raises(RuntimeError, match=r"^vLLM does not start: .*NoSuchModelForCausalLM") as refused:
        start(tmp_path)
    assert len(str(refused.value)) < 700


@pytest.mark.parametrize("block_size", [16, 48])
def test_a_block_size_that_the_attention_does_not_take(block_size: int, tmp_path: Path) -> None:
    """There are no weights here: they would be read later."""
    CONFIGS["llama"].save_pretrained(tmp_path)
    with pytest.raises(RuntimeError) as refused:
        start(tmp_path, block_size)
    assert str(refused.value) == (
        f"vLLM does not start: block_size = {block_size} is not supported: vLLM's CPU attention needs multiples of 32"
    )


SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([SinkFullAttentionSpec(**SHAPE, sink_len=32)], "SinkFullAttentionSpec"),
        ([FULL, SlidingWindowSpec(**SHAPE, sliding_window=8)], "FullAttentionSpec, SlidingWindowSpec"),
    ],
)
def test_a_cache_that_no_plan_describes(specs: list[KVCacheSpec], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"its KV cache is {told}, not one kind of attention"):
        refuse_cache("some/model", [KVCacheGroupSpec(["layer"], spec) for spec in specs])


@pytest.mark.parametrize("spec", [FULL, MLAAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=8)])
def test_caches_are_still_named_as_they_were(spec: KVCacheSpec) -> None:
    refuse_cache("some/model", [KVCacheGroupSpec(["layer"], spec)])
