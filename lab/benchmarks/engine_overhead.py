"""What of a step is not the model: planning, preparing, sampling and committing, as the engine times them itself.

The whole engine without a server, on our own executor; decodes of some requests, all of one length, no targets.

    python -m lab.benchmarks.engine_overhead [--requests 1 64] [--model neaptide-tiny]

Prints a table, then one JSON line; ``share`` is the median of the steps' shares.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import EMBEDDED, machine, model_111m, print_table, random_prompts, vocab_size
from benchmarks.engine_runs import WARM_UP_STEPS, Engine
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.messages import StepStats

PARTS = ("schedule", "prepare", "model", "sample", "commit")
LARGEST_SHARE = 0.05
"""Largest fraction of a step of 64 requests on the 111M model that may be spent outside the model."""
BLOCK_SIZE = 16
CONTEXT = 200


def start(model: Path, requests: int, steps: int, threads: int, dtype: str) -> Engine:
    max_model_len = CONTEXT + requests + 2 * (WARM_UP_STEPS + steps)
    blocks = requests * -(-max_model_len // BLOCK_SIZE) + 1
    return Engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=blocks, block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(
                max_num_seqs=requests, max_model_len=max_model_len, ttft_slo_s=3600.0, offline_max_kv_ratio=1.0
            ),
            executor=ExecutorConfig(model_path=str(model), device="cpu", dtype=dtype, num_threads=threads),
        )
    )


def summary(found: list[StepStats]) -> dict[str, Any]:
    """Medians in ms of each part, and of the share of all but the model."""
    times = [{part: getattr(stats, f"{part}_s") for part in PARTS} for stats in found]
    shares = [1.0 - each["model"] / sum(each.values()) for each in times]
    medians = {f"{part}_ms": round(1e3 * statistics.median(each[part] for each in times), 3) for part in PARTS}
    return {**medians, "share": round(statistics.median(shares), 4), "steps": len(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("111m", "neaptide-tiny"), default="111m")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = EMBEDDED if args.model == "neaptide-tiny" else model_111m()
    engine = start(model, max(args.requests), args.steps, args.threads, args.dtype)
    runs = []
    for requests in args.requests:
        prompts = random_prompts(requests, CONTEXT, vocab_size(model), seed=requests)
        runs.append({"requests": requests, **summary(engine.decode(prompts, args.steps))})
    dtype = engine.ready.dtype
    engine.close()
    columns = ["requests", *(f"{part}_ms" for part in PARTS), "share"]
    title = f"{model.name}, {dtype}, {args.threads} threads: a decode step, medians"
    print_table(title, columns, [[run[column] for column in columns] for run in runs])
    is_met = {str(run["requests"]): run["share"] <= LARGEST_SHARE for run in runs}
    found = {"model": model.name, "dtype": dtype, "threads": args.threads, "is_met": is_met, "runs": runs}
    print(json.dumps({"machine": machine()} | found))


if __name__ == "__main__":
    main()
