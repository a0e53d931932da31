"""Texts under our scheduler are those of plain vLLM: mixed requests of both kinds, in float32."""

import gc
import os
import random
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from neaptide.launch.serve import embedded_model_path

NUM_REQUESTS = int(os.environ.get("NEAPTIDE_TEST_REQUESTS", "200"))
OURS = {
    "scheduler_cls": "neaptide_vllm.scheduler",
    "additional_config": {"neaptide": {"ttft_ms": 2000, "tpot_ms": 100}},
}
SHAPES: dict[str, dict[str, Any]] = {
    "cache": {},
    "no-cache": {"enable_prefix_caching": False},
    "few-blocks": {"num_gpu_blocks_override": 24},
    "chunked": {"max_num_batched_tokens": 64},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


def requests() -> tuple[list[dict[str, Any]], list[SamplingParams], list[int]]:
    """Prompts of which a third share a prefix, their parameters, and priorities: every other one is offline."""
    draw = random.Random(5)
    shared = [draw.randrange(10, 400) for _ in range(96)]
    prompts = []
    for index in range(NUM_REQUESTS):
        own = [draw.randrange(10, 400) for _ in range(draw.choice((5, 17, 64, 200)))]
        prompts.append({"prompt_token_ids": (shared if index % 3 == 0 else []) + own})
    params = [
        SamplingParams(temperature=0, max_tokens=draw.choice((1, 8, 24, 40)), ignore_eos=True)
        for _ in range(NUM_REQUESTS)
    ]
    return prompts, params, [index % 2 for index in range(NUM_REQUESTS)]


def texts(has_priorities: bool, **arguments: Any) -> list[list[int]]:
    """Output tokens of all requests from one engine in this process."""
    shape: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "block_size": 32} | arguments
    llm = LLM(
        str(embedded_model_path()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=100_000_000,
        **shape,
    )
    prompts, params, priorities = requests()
    outputs = llm.generate(prompts, params, priority=priorities if has_priorities else None, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    del llm
    gc.collect()
    return found


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts(False)


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_those_of_plain_vllm(shape: str, plain: list[list[int]]) -> None:
    assert texts(True, **OURS, **SHAPES[shape]) == plain


def test_speculation_changes_no_text(plain: list[list[int]]) -> None:
    assert texts(True, **OURS, speculative_config=NGRAM) == plain


def test_structured_output() -> None:
    llm = LLM(str(embedded_model_path()), dtype="float32", enforce_eager=True, max_model_len=512, block_size=32,
              kv_cache_memory_bytes=100_000_000, **OURS)  # fmt: skip
    params = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    outputs = llm.generate(["Is it?"] * 8, params, priority=[0, 1] * 4, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}
