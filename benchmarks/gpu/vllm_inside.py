"""Measures the vllm executor's texts, throughput and decode steps; run by vLLM's interpreter, which holds one model.

python -m benchmarks.gpu.vllm_inside texts|steps --model DIR --device cuda|cpu --out FILE [--dry]
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common import GAP, random_prompts, vocab_size
from benchmarks.engine_runs import Engine
from benchmarks.gpu.correctness import PROMPT_TOKENS, compare_tokens
from benchmarks.gpu.dense_reference import dense_logits
from benchmarks.gpu.random_llama import TINY
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.messages import StepStats

BLOCK_SIZE = {"cpu": 32, "cuda": 16}
OUTPUT_TOKENS = 32
SEPARATE_TOKENS = 8
"""Differences in the lengths of a decode test's prompts, so that their blocks fill up in different steps."""


@dataclass(frozen=True, slots=True)
class Sizes:
    offline_requests: int
    offline_in: int
    offline_out: int
    batches: tuple[int, ...]
    context_tokens: int
    steps: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    kv_blocks: int | None
    """None: as many as vLLM's fraction of the memory holds."""


FULL = Sizes(512, 1000, 1000, (1, 64, 256), 1000, 64, 512, 2048, 8192, None)
DRY = Sizes(16, 20, 20, (1, 4, 16), 20, 8, 16, 256, 256, 256)


def start(model: Path, device: str, dtype: str, sizes: Sizes) -> Engine:
    eager = {"enforce_eager": "true"} if device == "cpu" else {}
    return Engine(
        EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE[device], num_blocks=sizes.kv_blocks),
            scheduler=SchedulerConfig(
                max_num_seqs=sizes.max_num_seqs,
                max_model_len=sizes.max_model_len,
                max_num_batched_tokens=sizes.max_num_batched_tokens,
                ttft_slo_s=3600.0,
                offline_max_kv_ratio=1.0,
            ),
            executor=ExecutorConfig(kind="vllm", model_path=str(model), device=device, dtype=dtype, arguments=eager),
        )
    )


def texts(model: Path, device: str) -> dict[str, Any]:
    """Compares greedy texts of a model of shape ``TINY`` in bf16 with dense logits on the same device."""
    engine = start(model, device, "bfloat16", DRY)
    lengths = [tokens for tokens in PROMPT_TOKENS if tokens + OUTPUT_TOKENS <= DRY.max_model_len]
    prompts = [random_prompts(1, tokens, TINY.vocab, seed=tokens)[0] for tokens in lengths]
    answers = engine.generate(prompts, OUTPUT_TOKENS)
    engine.close()
    weights = {
        name: weight.to(device) for file in model.glob("*.safetensors") for name, weight in load_file(file).items()
    }
    compared, wrong = 0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = dense_logits(weights, TINY, prompt + answer)[len(prompt) - 1 : -1]
        agreeing, difference = compare_tokens(logits, answer, GAP[torch.bfloat16])
        compared += agreeing
        wrong += [] if difference is None else [{"prompt_tokens": len(prompt)} | difference]
    return {"ok": not wrong and compared > 0, "tokens": OUTPUT_TOKENS * len(prompts), "tokens_compared": compared} | {
        "wrong": wrong
    }


def steps(model: Path, device: str, sizes: Sizes) -> dict[str, Any]:
    """Measures offline throughput, then decode steps at several batch sizes."""
    engine = start(model, device, "bfloat16", sizes)
    vocab = vocab_size(model)
    found: dict[str, Any] = {
        "num_blocks": engine.ready.num_blocks,
        "block_size": engine.ready.block_size,
    }
    engine.generate(random_prompts(4, sizes.offline_in, vocab, seed=1), 4)  # warm-up
    prompts = random_prompts(sizes.offline_requests, sizes.offline_in, vocab, seed=2)
    start_s = time.perf_counter()
    engine.generate(prompts, sizes.offline_out)
    seconds = time.perf_counter() - start_s
    found["offline"] = {
        "requests": sizes.offline_requests,
        "tokens_in": sizes.offline_in,
        "tokens_out": sizes.offline_out,
        "seconds": seconds,
        "output_tokens_per_s": sizes.offline_requests * sizes.offline_out / seconds,
        "total_tokens_per_s": sizes.offline_requests * (sizes.offline_in + sizes.offline_out) / seconds,
    }
    found["decode"] = []
    for batch in sizes.batches:
        prompts = [
            prompt[: len(prompt) - i % SEPARATE_TOKENS]
            for i, prompt in enumerate(random_prompts(batch, sizes.context_tokens, vocab, seed=3))
        ]
        found["decode"].append({"batch": batch} | summary(engine.decode(prompts, sizes.steps)))
    engine.close()
    return found


def summary(stats: Sequence[StepStats]) -> dict[str, Any]:
    """Medians over steps in ms. A step lasts from the end of the previous one to its own end."""
    ends_s = [one.now_s for one in stats]
    columns = {
        "step": [after - before for before, after in itertools.pairwise(ends_s)],
        "plan": [one.schedule_s for one in stats],
        "translate": [one.prepare_s for one in stats],
        "model": [one.model_s for one in stats],
        "collect": [one.sample_s for one in stats],
        "commit": [one.commit_s for one in stats],
    }
    return {"steps": len(stats)} | {f"{name}_ms": 1e3 * statistics.median(values) for name, values in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", "steps"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.what == "texts":
        found = texts(args.model, args.device)
    else:
        found = steps(args.model, args.device, DRY if args.dry else FULL)
    args.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
