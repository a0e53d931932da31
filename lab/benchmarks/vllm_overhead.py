"""What the vllm executor costs beside vLLM's runner: translation of plans and collection of answers, per decode step.

The whole engine over vLLM's workers, on a small random Llama; times are those that the executor measures itself:
``prepare_s`` (from plan to ``SchedulerOutput``) and ``sample_s`` (from ``ModelRunnerOutput`` to result). Prompts differ
in length, so that in every step some requests get another block. To be run by vLLM's interpreter:

    PYTHONPATH=. .vllm/bin/python -m lab.benchmarks.vllm_overhead [--requests 64 1024] [--steps N] [--profile]

Prints a table, then one JSON line.
"""

import argparse
import cProfile
import json
import pstats
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import FIRST_TOKEN_ID, print_table
from benchmarks.engine_runs import Engine
from benchmarks.gpu.random_llama import LlamaShape, write_model_dir
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig

SMALL = LlamaShape(128, 256, 2, 4, 2, 32, 512, 2048)
GOALS_MS = {64: 0.15, 1024: 0.7}
BLOCK_SIZE = 32
PROMPT_TOKENS = (8, 40)
"""Shortest and longest."""
LEAST_STEPS = 100
COLUMNS = ("translate", "collect", "both", "model")


def start(model: Path, requests: int, max_model_len: int) -> Engine:
    blocks = requests * -(-max_model_len // BLOCK_SIZE)
    return Engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=blocks, block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(
                max_num_seqs=requests, max_model_len=max_model_len, ttft_slo_s=3600.0, offline_max_kv_ratio=1.0
            ),
            executor=ExecutorConfig(
                kind="vllm", model_path=str(model), dtype="float32", arguments={"enforce_eager": "true"}
            ),
        )
    )


def measure(engine: Engine, requests: int, steps: int) -> dict[str, Any]:
    """Medians and 90th percentiles, ms."""
    rng = random.Random(requests)
    lengths = [rng.randint(*PROMPT_TOKENS) for _ in range(requests)]
    prompts = [[rng.randrange(FIRST_TOKEN_ID, SMALL.vocab) for _ in range(length)] for length in lengths]
    found = engine.decode(prompts, steps)
    times = {
        "translate": [stats.prepare_s for stats in found],
        "collect": [stats.sample_s for stats in found],
        "both": [stats.prepare_s + stats.sample_s for stats in found],
        "model": [stats.model_s for stats in found],
    }
    result: dict[str, Any] = {"requests": requests, "steps": len(found)}
    for name, seconds in times.items():
        result[f"{name}_ms"] = [round(1e3 * statistics.median(seconds), 4), round(1e3 * _p90(seconds), 4)]
    if (goal_ms := GOALS_MS.get(requests)) is not None:
        result |= {"goal_ms": goal_ms, "is_met": result["both_ms"][0] <= goal_ms}
    return result


def _p90(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=10)[-1]


def profiled(engine: Engine, requests: int, steps: int) -> dict[str, Any]:
    profiler = cProfile.Profile()
    profiler.enable()
    result = measure(engine, requests, steps)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("executors/vllm")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=sorted(GOALS_MS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="where the time goes; the times themselves are longer")
    args = parser.parse_args()
    steps = max(args.steps, LEAST_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        write_model_dir(Path(directory), SMALL, torch.float32, torch.device("cpu"))
        # Room for prompts that wait for the others' first steps.
        engine = start(Path(directory), max(args.requests), PROMPT_TOKENS[1] + 2 * steps)
        runs = [(profiled if args.profile else measure)(engine, requests, steps) for requests in args.requests]
        engine.close()
    rows = []
    for run in runs:
        times = ("{:.3f} / {:.3f}".format(*run[f"{name}_ms"]) for name in COLUMNS)
        rows.append([run["requests"], *times, run.get("goal_ms", "-")])
    print_table("ms of a decode step, median / p90", ["requests", *COLUMNS, "goal of both"], rows)
    print(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
