"""Times whole steps of the executor in turn: launched kernel by kernel, and replayed as graphs where possible. Some of
them also copy blocks to and from host memory."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.copies import BLOCKS, DRY_BLOCKS, measure_copies
from benchmarks.gpu.correctness import BLOCK_SIZE
from benchmarks.gpu.weights import random_model
from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, ExecutorConfig
from neaptide.estimator.calibration.micro_runs import MicroRunner, Parts
from neaptide.executors.torch.torch_executor import TorchExecutor

DECODES, CONTEXT_TOKENS = (1, 8, 32, 64, 128, 256, 384, 512), 500
MIXED = ((32, 128), (128, 128), (64, 448), (64, 896))
"""Numbers of decodes and of prompt tokens in mixed steps; 1,024 together is the most that is replayed."""
COPYING, DRY_COPYING = ("64 decodes", "64 decodes and a prompt of 448"), ("1 decodes",)
"""Steps that are also timed with copies."""
REPEATS, DRY_REPEATS = 15, 1


def steps(*, dry: bool) -> dict[str, Parts]:
    """Steps by name: decodes alone, and with a prompt."""
    found: dict[str, Parts] = {}
    for count in DECODES[:2] if dry else DECODES:
        found[f"{count} decodes"] = ((1, CONTEXT_TOKENS),) * count
    for count, prompt_tokens in () if dry else MIXED:
        parts = (*(((1, CONTEXT_TOKENS),) * count), (prompt_tokens, 0))
        found[f"{count} decodes and a prompt of {prompt_tokens}"] = parts
    return found


def measure_steps(device: torch.device, *, dry: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Median seconds from submission to result; ``replayed_s`` is None if the step is not replayed."""
    clock, repeats, copied_blocks = MonotonicClock(), DRY_REPEATS if dry else REPEATS, DRY_BLOCKS if dry else BLOCKS
    with random_model(device, dry=dry, progress=progress) as model:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=320 if dry else None, num_host_blocks=2 * copied_blocks)
        executor = TorchExecutor(ExecutorConfig(model_path=str(model), device=device.type), cache, clock)
    runner, graphs = MicroRunner(executor, clock, BLOCK_SIZE), executor._runner.graphs
    ways = {"launched_s": None} | ({} if graphs is None else {"replayed_s": graphs})
    rows = []
    for name, parts in steps(dry=dry).items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, used in ways.items():
                executor._runner.graphs = used
                seconds[way].append(runner.run(parts))
        row = {"step": name, "replayed_s": None} | {way: median(times) for way, times in seconds.items()}
        rows.append(row)
        replayed = "" if row["replayed_s"] is None else f", replayed {1e3 * row['replayed_s']:.2f}"
        progress(f"{name}: launched {1e3 * row['launched_s']:.2f} ms{replayed}")
    with_copies = {name: parts for name, parts in steps(dry=dry).items() if name in (DRY_COPYING if dry else COPYING)}
    copies = measure_copies(executor, clock, with_copies, repeats, copied_blocks)
    for row in copies:
        progress(
            f"{row['step']}, {row['saved_blocks']} blocks saved, {row['loaded_blocks']} loaded: without "
            f"{1e3 * row['without_s']:.2f} ms, beside {1e3 * row['beside_s']:.2f}, in line "
            f"{1e3 * row['in_line_s']:.2f}"
        )
    executor.close()
    return {"context_tokens": CONTEXT_TOKENS, "is_replayed": graphs is not None, "steps": rows, "copies": copies}
