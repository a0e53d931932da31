"""A LoRA adapter of random weights under our scheduler: texts are those of plain vLLM."""

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from neaptide.launch.serve import embedded_model_path

OURS = {
    "scheduler_cls": "neaptide_vllm.scheduler",
    "additional_config": {"neaptide": {"ttft_ms": 2000, "tpot_ms": 100}},
}
NUM_REQUESTS = 24
RANK = 4
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def texts(prompts: list[Any], *, is_ours: bool, lora: LoRARequest | None = None, **arguments: Any) -> list[list[int]]:
    """Output tokens of one engine in this process; every other request is offline if it is ours."""
    llm = LLM(
        str(embedded_model_path()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=32,
        kv_cache_memory_bytes=50_000_000,
        **(OURS if is_ours else {}),
        **arguments,
    )
    priority = [index % 2 for index in range(len(prompts))] if is_ours else None
    outputs = llm.generate(prompts, PARAMS, priority=priority, lora_request=lora, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    del llm
    gc.collect()
    return found


@pytest.fixture
def adapter(tmp_path: Path) -> LoRARequest:
    """An adapter of random weights for the embedded model."""
    config = json.loads((embedded_model_path() / "config.json").read_text(encoding="utf-8"))
    draw = torch.Generator().manual_seed(0)
    hidden, heads = config["hidden_size"], config["head_dim"]
    widths = {"q_proj": config["num_attention_heads"] * heads, "v_proj": config["num_key_value_heads"] * heads}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=draw)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=draw)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    described |= {"target_modules": list(widths), "base_model_name_or_path": "tiny"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return LoRARequest("random", 1, str(tmp_path))


def test_an_adapter_answers_as_under_plain_vllm(adapter: LoRARequest) -> None:
    """All requests use it: vLLM's CPU build gives the adapter to every row of a step that has both kinds."""
    draw = random.Random(3)
    prompts = [
        {"prompt_token_ids": [draw.randrange(10, 400) for _ in range(draw.choice((5, 40, 150)))]}
        for _ in range(NUM_REQUESTS)
    ]
    has_lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    plain = texts(prompts, is_ours=False, lora=adapter, **has_lora)
    assert texts(prompts, is_ours=True, lora=adapter, **has_lora) == plain
    assert texts(prompts, is_ours=True) != plain, "the adapter changes answers"
