"""Steps of our executor on a CPU, with its own kernels and with torch's, by turns in one run.

Greedy texts are compared with ``transformers`` first. Then every shape of step runs on both, one after the other, as
often as ``--repeats`` says; times are CPU seconds of the process (other work on the machine hardly changes them) and,
beside them, seconds by the clock. ``--parts`` says where a step's CPU time goes, in place of comparing;
``--batch-invariant`` compares that mode with none, ``--quantized`` 8-bit numbers with none (whose texts may differ:
what they do to them says ``lab.benchmarks.quantization``), ``--recorded`` steps whose layers are one call with such
that make every call, in place of torch's kernels with ours.

    python -m lab.benchmarks.cpu_kernels --model 111m --threads 1

Prints a table, then one JSON line: ratios above 1 mean that our kernels, or 8-bit numbers, are faster, or say how many
times as long steps take in the mode.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import EMBEDDED, Reference, machine, model_111m, print_table, random_prompts, vocab_size
from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, ExecutorConfig
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.executors.torch import torch_executor
from neaptide.executors.torch.layers.linear import Linear
from neaptide.executors.torch.layers.norm import RMSNorm
from neaptide.executors.torch.models import decoder
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels.layer_ops import NativeLayerOps, TorchLayerOps

BLOCK_SIZE = 16
NUM_BLOCKS = 1400
KERNELS = ("torch", "auto")
INVARIANT = ("batch-invariant", "auto")
QUANTIZED = ("auto", "w8a8")
RECORDED = ("call by call", "auto")
TOKEN_ID = 11
RIGHT = 0.95
"""Least ratio of torch's time to ours; the rest is noise."""

Shape = tuple[tuple[tuple[int, int], ...], int]
"""(tokens, context) of each request, and how many context tokens all of them share."""

SHAPES: dict[str, Shape] = {
    "decode 1, context 250": (((1, 250),), 0),
    "decode 8, context 250": (((1, 250),) * 8, 0),
    "decode 32, context 200-293": (tuple((1, 200 + 3 * i) for i in range(32)), 0),
    "decode 64, context 200-326": (tuple((1, 200 + 2 * i) for i in range(64)), 0),
    "prefill 256": (((256, 0),), 0),
    "prefill 64 behind 1,024": (((64, 1024),), 0),
    "prefill 256 behind 1,024": (((256, 1024),), 0),
    "prefill 256 behind 7,936": (((256, 7936),), 0),
    "128 of a prompt and 16 decodes": (((128, 128), *((1, 250),) * 16), 0),
    "decode 16, context 1,100": (((1, 1100),) * 16, 0),
    "decode 16, 1,024 of 1,100 shared": (((1, 1100),) * 16, 1024),
}


class Steps:
    """An executor, and steps made by hand on it."""

    def __init__(self, model: Path, kernels: str, dtype: str, threads: int) -> None:
        is_invariant, is_quantized = kernels == INVARIANT[0], kernels == QUANTIZED[1]
        config = ExecutorConfig(
            model_path=str(model),
            device="cpu",
            dtype="float32" if is_invariant else dtype,
            num_threads=threads,
            cpu_kernels="torch" if kernels == "torch" else "auto",
            quantization=kernels if is_quantized else "none",
            batch_invariant=is_invariant,
        )
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        self.executor = TorchExecutor(config, cache, MonotonicClock())
        self.executor.touch_blocks(NUM_BLOCKS)
        if kernels == RECORDED[0]:
            self.call_by_call()
        self._count = 0

    def call_by_call(self) -> None:
        """No step's layers are one call from now on."""
        self.executor._runner.recorded = None

    def run(self, shape: Shape) -> tuple[float, float]:
        """CPU seconds and seconds of one step."""
        parts, shared_tokens = shape
        self._count += 1
        shared = list(range(shared_tokens // BLOCK_SIZE))
        next_block, new, scheduled = len(shared), [], []
        for index, (num_tokens, context) in enumerate(parts):
            request_id, prompt = f"{self._count}-{index}", [TOKEN_ID] * (context + num_tokens)
            own = -(-len(prompt) // BLOCK_SIZE) - len(shared)
            blocks = [*shared, *range(next_block, next_block + own)]
            next_block += own
            new.append(NewRequest(request_id, prompt, SamplingParams(temperature=0.0)))
            scheduled.append(ScheduledRequest(request_id, prompt[context:], context, blocks, True, 0))
        self.executor.submit(StepPlan.of_parts(self._count, [], new)).wait()
        plan = StepPlan.of_parts(self._count, scheduled)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        self.executor.submit(plan).wait()
        taken = time.process_time() - cpu_s, time.perf_counter() - start_s
        self.executor.submit(StepPlan.of_parts(self._count, [], finished_ids=plan.request_ids)).wait()
        return taken

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy, all at once."""
        blocks = -(-(len(prompts[0]) + new_tokens) // BLOCK_SIZE)
        ids = [f"text-{i}" for i in range(len(prompts))]
        new = [NewRequest(i, p, SamplingParams(temperature=0.0)) for i, p in zip(ids, prompts, strict=True)]
        tokens = [list(prompt) for prompt in prompts]
        computed = 0
        for step in range(new_tokens):
            scheduled = [
                ScheduledRequest(
                    ids[i], each[computed:], computed, list(range(i * blocks, (i + 1) * blocks)), True, step
                )
                for i, each in enumerate(tokens)
            ]
            computed = len(tokens[0])
            plan = StepPlan.of_parts(step, scheduled, new if step == 0 else [])
            sampled = self.executor.submit(plan).wait().tokens_by_id(plan)
            for i, each in enumerate(tokens):
                each.append(sampled[ids[i]])
        self.executor.submit(StepPlan.of_parts(new_tokens, [], finished_ids=ids)).wait()
        return [each[len(prompts[0]) :] for each in tokens]


def check(model: Path, both: dict[str, Steps]) -> int:
    """Raises SystemExit when a text is not the reference's; returns how many tokens were compared."""
    prompts = random_prompts(4, 70, vocab_size(model), seed=1)
    return sum(
        Reference(model, steps.executor.dtype).agreement(prompt, tokens)
        for kernels, steps in both.items()
        if kernels != QUANTIZED[1]
        for prompt, tokens in zip(prompts, steps.generate(prompts, 24), strict=True)
    )


def slower(results: Sequence[dict[str, Any]]) -> list[str]:
    """Steps for which our choice of kernels was clearly the wrong one."""
    return [result["step"] for result in results if max(result["ratio"], result["ratio_of_medians"]) < RIGHT]


def compare(both: dict[str, Steps], repeats: int, shapes: Mapping[str, Shape] = SHAPES) -> list[dict[str, Any]]:
    results = []
    base, ours = both
    for name, shape in shapes.items():
        times: dict[str, list[tuple[float, float]]] = {kernels: [] for kernels in both}
        for steps in both.values():
            steps.run(shape)
        for repeat in range(repeats):
            order = list(both.items())
            for kernels, steps in order if repeat % 2 else reversed(order):
                times[kernels].append(steps.run(shape))
        result: dict[str, Any] = {"step": name}
        for kernels, taken in times.items():
            for which, values in zip(("cpu", "clock"), zip(*taken, strict=True), strict=True):
                result[f"{kernels}_{which}_ms"] = round(1e3 * min(values), 2)
                result[f"{kernels}_{which}_median_ms"] = round(1e3 * statistics.median(values), 2)
        result["ratio"] = round(result[f"{base}_cpu_ms"] / result[f"{ours}_cpu_ms"], 3)
        medians = (result[f"{kernels}_cpu_median_ms"] for kernels in (base, ours))
        result["ratio_of_medians"] = round(next(medians) / next(medians), 3)
        results.append(result)
    return results


class Parts:
    """CPU seconds of the parts of a step, taken by wrapping what computes them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = 0
        for owner, name, part in (
            (Linear, "__call__", "linear"),
            (Linear, "add_to", "linear"),
            (RMSNorm, "__call__", "norm"),
            (TorchLayerOps, "rotate_and_store", "rotary, KV write"),
            (TorchLayerOps, "silu_multiply", "gate"),
            (NativeLayerOps, "rotate_and_store", "rotary, KV write"),
            (NativeLayerOps, "silu_multiply", "gate"),
            (decoder.Decoder, "logits", "logits"),
            (torch_executor, "build_input_batch", "prepare"),
            (torch_executor, "sample", "sample"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def of(self, steps: Steps, shape: Shape, repeats: int) -> dict[str, float]:
        """Milliseconds by part, of the fastest of some steps."""
        best: dict[str, float] = {}
        for _ in range(repeats):
            self.seconds = {}
            total, _ = steps.run(shape)
            if not best or total < best["whole step"]:
                best = {"whole step": total, **self.seconds}
        best["rest"] = best["whole step"] - sum(value for part, value in best.items() if part != "whole step")
        return {part: round(1e3 * value, 1) for part, value in best.items()}

    def watch_attention(self, steps: Steps) -> None:
        """Plans are of different classes; what the model runner makes them with is its own."""
        runner = steps.executor._runner
        plan = runner.plan_attention

        def planned(*arguments: Any) -> Any:
            made = plan(*arguments)
            kind = type(made)
            if not hasattr(kind, "timed"):
                kind.attend, kind.timed = self._timed(kind.attend, "attention"), True
            return made

        runner.plan_attention = planned

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start_s = 1, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = 0
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start_s

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("111m", "neaptide-tiny"), default="111m")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--parts", choices=KERNELS, help="where the time of a step goes, with these kernels")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--batch-invariant", action="store_true", help="compare that mode with none")
    modes.add_argument("--quantized", action="store_true", help="compare 8-bit numbers with none")
    modes.add_argument("--recorded", action="store_true", help="compare layers call by call with one call")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # which products were chosen
    model = EMBEDDED if args.model == "neaptide-tiny" else model_111m()
    torch.set_num_threads(args.threads)
    if args.parts:
        steps, parts = Steps(model, args.parts, args.dtype, args.threads), Parts()
        steps.call_by_call()  # one that is a single call has no parts
        parts.watch_attention(steps)
        found = {name: parts.of(steps, shape, args.repeats) for name, shape in SHAPES.items()}
        columns = list(dict.fromkeys(part for each in found.values() for part in each))
        rows = [[name, *(each.get(part, 0.0) for part in columns)] for name, each in found.items()]
        print_table(f"CPU ms of a step, {args.parts}, {args.threads} threads", ["step", *columns], rows)
        print(json.dumps({"kernels": args.parts, "threads": args.threads, "parts_ms": found}))
        return
    pair = INVARIANT if args.batch_invariant else QUANTIZED if args.quantized else KERNELS
    if args.recorded:
        pair = RECORDED
    both = {kernels: Steps(model, kernels, args.dtype, args.threads) for kernels in pair}
    checked = check(model, both)
    results = compare(both, args.repeats)
    columns = [
        "step",
        *(f"{each}, CPU ms" for each in pair),
        "ratio",
        "of medians",
        *(f"clock: {each}" for each in pair),
    ]
    keys = ["step", *(f"{each}_cpu_ms" for each in pair), "ratio", "ratio_of_medians"]
    keys += [f"{each}_clock_ms" for each in pair]
    dtype = both["auto"].executor.dtype_name
    print_table(
        f"{model.name}, {dtype}, {args.threads} threads", columns, [[result[key] for key in keys] for result in results]
    )
    ratios = {result["step"]: result["ratio"] for result in results}
    print(
        json.dumps(
            {
                "machine": machine(),
                "compared": pair,
                "ratios": ratios,
                "slower": slower(results),
                "checked_tokens": checked,
                "dtype": dtype,
                "threads": args.threads,
                "steps": results,
            }
        )
    )


if __name__ == "__main__":
    main()
