"""Models that a plan of ours cannot drive, or that would run code of their own, are refused in one line."""

from pathlib import Path

import pytest
from transformers import BertConfig, FalconH1Config, MambaConfig, PreTrainedConfig, Qwen2AudioConfig

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.executors.registry import start_executor
from neaptide.models.config import UnsupportedModelError
from tests.executors.vllm.inside.families import CONFIGS, bring_own_code
from tests.executors.vllm.inside.runs import LIMITS


def start(directory: Path) -> None:
    config = EngineConfig(
        cache=CacheConfig(num_blocks=48, block_size=32),
        scheduler=SchedulerConfig(**LIMITS),
        executor=ExecutorConfig(kind="vllm", model_path=str(directory), dtype="float32", num_threads=1),
    )
    start_executor(config, MonotonicClock())


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("Qwen2AudioForConditionalGeneration", Qwen2AudioConfig(), "it is multimodal"),
        ("BertModel", BertConfig(), "it generates no text"),
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
    with pytest.raises(UnsupportedModelError, match=r"this vLLM knows no such model; .* that is never run$"):
        start(tmp_path)


def test_a_family_that_vllm_does_not_know_is_told_in_few_words(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    bring_own_code(tmp_path, architectures=["NoSuchModelForCausalLM"])
    with pytest.raises(RuntimeError, match=r"^vLLM does not start: .*NoSuchModelForCausalLM") as refused:
        start(tmp_path)
    assert len(str(refused.value)) < 700
