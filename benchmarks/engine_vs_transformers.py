"""Offline throughput of the engine against batched ``transformers.generate``, on the same weights and threads.

64 requests, 256 tokens in and 64 out, greedy; interleaved repeats in one run. Correctness is checked first: no
figures from an engine that computes something else. Prints a table, then one JSON line.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.common import EMBEDDED, Reference, model_111m, print_table, random_prompts, vocab_size
from benchmarks.engine_runs import Engine
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig

REQUESTS, TOKENS_IN, TOKENS_OUT = 64, 256, 64


def start(model: Path, dtype: str, threads: int) -> Engine:
    return Engine(
        EngineConfig(
            # No reuse between repeats: every run computes all of its tokens, as generate does.
            cache=CacheConfig(enable_prefix_cache=False),
            scheduler=SchedulerConfig(max_model_len=1024, ttft_slo_s=3600.0, offline_max_kv_ratio=1.0),
            executor=ExecutorConfig(model_path=str(model), device="cpu", dtype=dtype, num_threads=threads),
        )
    )


def compare(name: str, model: Path, args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    engine = start(model, args.dtype, args.threads)
    reference = Reference(model, getattr(torch, args.dtype))
    vocab = vocab_size(model)
    seconds: dict[str, list[float]] = {"engine": [], "transformers": []}
    checked = 0
    for repeat in range(args.repeats):
        prompts = random_prompts(REQUESTS, TOKENS_IN, vocab, seed=repeat)
        start_s = time.perf_counter()
        ours = engine.generate(prompts, TOKENS_OUT)
        seconds["engine"].append(time.perf_counter() - start_s)
        if repeat == 0:
            checked = sum(reference.agreement(p, t) for p, t in list(zip(prompts, ours, strict=True))[:8])
        start_s = time.perf_counter()
        reference.generate(prompts, TOKENS_OUT)
        seconds["transformers"].append(time.perf_counter() - start_s)
    total = REQUESTS * (TOKENS_IN + TOKENS_OUT)
    best = {name: total / min(s) for name, s in seconds.items()}
    return {
        "model": name,
        "checked_tokens": checked,
        "engine_tokens_per_s": round(best["engine"], 1),
        "transformers_tokens_per_s": round(best["transformers"], 1),
        "ratio": round(best["engine"] / best["transformers"], 3),
        "ratio_by_repeat": [round(t / e, 3) for e, t in zip(seconds["engine"], seconds["transformers"], strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["neaptide-tiny", "111m"], choices=["neaptide-tiny", "111m"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    results = [compare(name, EMBEDDED if name == "neaptide-tiny" else model_111m(), args) for name in args.models]
    columns = ["model", "engine tok/s", "transformers tok/s", "ratio"]
    rows = [[r["model"], r["engine_tokens_per_s"], r["transformers_tokens_per_s"], r["ratio"]] for r in results]
    print_table(f"{REQUESTS} requests, {TOKENS_IN} in / {TOKENS_OUT} out, {args.dtype}", columns, rows)
    ratios = {str(r["model"]): r["ratio"] for r in results}
    print(json.dumps({"ratios": ratios, "dtype": args.dtype, "threads": args.threads, "results": results}))


if __name__ == "__main__":
    main()
