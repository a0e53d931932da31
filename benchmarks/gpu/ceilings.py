"""The device's own limits: matrix products, copies, attention, transfers. None of our code is timed."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.random_llama import LLAMA_8B, TINY, LlamaShape

REPEATS = 5
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    shape: LlamaShape
    rows: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    copy_bytes: int
    transfer_bytes: tuple[int, ...]
    rotated_bytes: int
    """Each projection gets as many weight copies as exceed this size. Repeated products then read weights from memory,
    as a model's layers do, and not from the cache."""
    target_s: float
    """Duration of one timed loop."""


FULL = Sizes(
    LLAMA_8B,
    tuple(1 << power for power in range(14)),
    (512, 1024, 2048, 4096, 8192, 16384),
    4 << 30,
    (64 << 10, 2 << 20, 64 << 20, 1 << 30),
    rotated_bytes=256 << 20,
    target_s=0.03,
)
DRY = Sizes(TINY, (1, 8), (32, 64), 1 << 20, (4 << 10, 1 << 20), rotated_bytes=0, target_s=0.002)


def measure_ceilings(device: torch.device, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Medians of ``REPEATS`` timed loops each, on random data."""
    with torch.inference_mode():
        found: dict[str, Any] = {"gemm": []}
        for name, (outputs, inputs) in sizes.shape.projections.items():
            found["gemm"] += _gemm(name, outputs, inputs, device, sizes)
            best = max(row["tflops"] for row in found["gemm"] if row["projection"] == name)
            progress(f"gemm {name} {outputs} x {inputs}: up to {best:.3g} TFLOP/s")
        found["copy"] = _copy(device, sizes)
        progress(f"device copy: {found['copy']['gb_per_s']:.4g} GB/s, read and written")
        found["attention"] = [_attention(tokens, device, sizes) for tokens in sizes.prompt_tokens]
        progress(f"causal attention: up to {max(row['tflops'] for row in found['attention']):.3g} TFLOP/s")
        found["transfers"] = [row for size in sizes.transfer_bytes for row in _transfers(size, device, sizes)]
        progress(f"transfers: up to {max(row['gb_per_s'] for row in found['transfers']):.3g} GB/s")
    return found


def seconds_per_call(call: Callable[[], object], device: torch.device, target_s: float) -> float:
    """Seconds per call, as the median over loops of about ``target_s``. Calls follow each other without a wait."""
    _loop_s(call, device, 3)  # warm-up: loads libraries, selects kernels
    calls = max(1, min(1000, int(target_s / max(_loop_s(call, device, 1), 1e-7))))
    return statistics.median(_loop_s(call, device, calls) / calls for _ in range(REPEATS))


def _loop_s(call: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start_s


def _gemm(name: str, outputs: int, inputs: int, device: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    dtype = torch.bfloat16
    copies = 1 + sizes.rotated_bytes // (outputs * inputs * dtype.itemsize)
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(copies)]
    found = []
    for rows in sizes.rows:
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        out = torch.empty(rows, outputs, device=device, dtype=dtype)
        seconds = seconds_per_call(partial(_multiply, x, itertools.cycle(weights), out), device, sizes.target_s)
        moved_bytes = dtype.itemsize * (rows * inputs + outputs * inputs + rows * outputs)
        found.append(
            {
                "projection": name,
                "outputs": outputs,
                "inputs": inputs,
                "rows": rows,
                "seconds": seconds,
                "tflops": 2 * rows * outputs * inputs / seconds / 1e12,
                "gb_per_s": moved_bytes / seconds / 1e9,
            }
        )
    return found


def _multiply(x: Tensor, weights: Iterator[Tensor], out: Tensor) -> None:
    torch.mm(x, next(weights).t(), out=out)


def _copy(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    source = torch.randn(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds = seconds_per_call(lambda: target.copy_(source), device, sizes.target_s)
    return {"bytes": sizes.copy_bytes, "seconds": seconds, "gb_per_s": 2 * sizes.copy_bytes / seconds / 1e9}


def _attention(tokens: int, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """One causal prompt of ``tokens`` tokens; half of the token pairs count."""
    shape = sizes.shape
    query = torch.randn(1, shape.heads, tokens, shape.head_dim, device=device, dtype=torch.bfloat16)
    key = torch.randn(1, shape.kv_heads, tokens, shape.head_dim, device=device, dtype=torch.bfloat16)
    value = torch.randn_like(key)
    seconds = seconds_per_call(
        lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
        device,
        sizes.target_s,
    )
    flops = 4 * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2
    return {"tokens": tokens, "seconds": seconds, "tflops": flops / seconds / 1e12}


def _transfers(num_bytes: int, device: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    pinned = device.type == "cuda"
    host = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty_like(host, device=device)
    found = []
    for direction, target, source in (("host_to_device", there, host), ("device_to_host", host, there)):
        seconds = seconds_per_call(partial(target.copy_, source, non_blocking=True), device, sizes.target_s)
        found.append(
            {
                "direction": direction,
                "bytes": num_bytes,
                "pinned": pinned,
                "seconds": seconds,
                "gb_per_s": num_bytes / seconds / 1e9,
            }
        )
    return found
