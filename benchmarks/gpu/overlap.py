"""Measures whether a device computes products and attention faster at once than one after the other.

Operators that overlap are NanoFlow's idea and BlendServe's assumption; ``neaptide.estimator`` describes them by kappa.

A step's layers run in two ways: as the executor launches them, and split into two halves on two streams, one part of a
layer apart, so that one half's attention meets the other half's products. The cost of a split is included, because
every weight is read twice. Without that cost: products and attention of two independent steps. Both are also measured
with products limited to some of the multiprocessors, which leaves the others to attention (NanoFlow).
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.ceilings import seconds_per_call
from benchmarks.gpu.kernels import BLOCK_SIZE, Step
from benchmarks.gpu.random_llama import LLAMA_8B, TINY, LlamaShape
from neaptide.kernels.paged_attention import StepTables
from neaptide.kernels.prefix_attention.attention import PrefixAttention, PrefixPlan

LAYERS, WEIGHT_SETS = 8, 4
"""Number of a step's layers that run, and of distinct weights and caches. The device's caches hold none of these until
they are used again."""
TARGET_S = 0.05
PROCESSORS = (1.0, 0.75, 0.5)
"""Fractions of the device's multiprocessors that products may use."""
TOLERANCE = 5e-2
"""Norm of the difference between the halves' hidden states and the step's, relative to the step's. In bf16, products of
other rows round differently."""

Progress = Callable[[str], None]
Requests = Sequence[int]


def _step(decodes: int, context: int, chunks: Sequence[int]) -> Step:
    name = f"{decodes} decodes at {context} and {sum(chunks)} tokens of prompts"
    return Step(name, (1,) * decodes + tuple(chunks), (context - 1,) * decodes + (0,) * len(chunks))


STEPS = (
    _step(256, 2048, (256, 256)),
    _step(256, 1024, (384, 384)),
    _step(128, 2048, (448, 448)),
    _step(384, 2048, (320, 320)),
    _step(192, 2048, (464,) * 4),
)
DRY_STEPS = (_step(4, 20, (6, 5)),)


@dataclass(slots=True, frozen=True)
class Layer:
    """Weights [outputs, inputs] as the executor stacks them, and keys and values of a whole step, [blocks, block_size,
    2 * kv_heads, head_dim]; all in bf16."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    cache: Tensor


@dataclass(slots=True, frozen=True)
class Part:
    """Some of a step's requests, computed separately."""

    plan: PrefixPlan
    hidden: Tensor
    """[tokens, hidden] in bf16."""


def measure_overlap(device: torch.device, *, dry: bool, progress: Progress) -> dict[str, Any]:
    """Median seconds of ``LAYERS`` layers for each way to compute them; gains are relative to the whole step's time.

    Raises:
        RuntimeError: the halves' results differ from the step's.
    """
    shape, rows = TINY if dry else LLAMA_8B, []
    with torch.inference_mode():
        for step in DRY_STEPS if dry else STEPS:
            rows.append(_Case(step, shape, device, dry=dry).measure())
            row = rows[-1]
            progress(
                f"{step.name}: {row['whole_s'] * 1e3:.2f} ms, split "
                + ", ".join(f"{way['split']} ({way['processors']:.0%}) {way['gain']:+.1%}" for way in row["splits"])
                + f"; apart {row['products_s'] * 1e3:.2f} and {row['attention_s'] * 1e3:.2f} ms, at once "
                + ", ".join(f"({way['processors']:.0%}) {way['seconds'] * 1e3:.2f}" for way in row["at_once"])
                + f": kappa {row['kappa']:.2f}"
            )
    return {"layers": LAYERS, "tolerance": TOLERANCE, "steps": rows}


class _Case:
    """One step, with every way to compute it."""

    def __init__(self, step: Step, shape: LlamaShape, device: torch.device, *, dry: bool) -> None:
        self.step, self.shape, self.device = step, shape, device
        self.num_layers, self.processors = (1, (1.0,)) if dry else (LAYERS, PROCESSORS)
        self.tables, _ = step.tables()
        self.attention = PrefixAttention(
            shape.heads, shape.kv_heads, shape.head_dim, torch.bfloat16, BLOCK_SIZE, device
        )
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(torch.bfloat16)

        blocks = int(self.tables.max()) + 1
        projections = {name: size for name, size in shape.projections.items() if name != "lm_head"}
        self.layers = [
            Layer(
                **{name: normal(*size) * size[1] ** -0.5 for name, size in projections.items()},
                cache=normal(blocks, BLOCK_SIZE, 2 * shape.kv_heads, shape.head_dim),
            )
            for _ in range(WEIGHT_SETS)
        ]
        self.hidden = normal(sum(step.query_lens), shape.hidden)

    def measure(self) -> dict[str, Any]:
        count = len(self.step.query_lens)
        decodes = [number for number in range(count) if self.step.query_lens[number] == 1]
        prompts = [number for number in range(count) if self.step.query_lens[number] > 1]
        whole = self.part(range(count))
        expected = self.compute_layers([whole])[0].float()
        whole_s = self.seconds(partial(self.compute_layers, [whole]))
        found: dict[str, Any] = {"step": self.step.name, "tokens": len(self.hidden), "whole_s": whole_s, "splits": []}
        splits = {
            "decodes, prompts": (decodes, prompts),
            "half of each": (decodes[::2] + prompts[::2], decodes[1::2] + prompts[1::2]),
        }
        for name, split in splits.items():
            halves = [self.part(requests) for requests in split]
            computed = zip(split, self.compute_layers(halves), strict=True)
            wanted = [(hidden.float(), expected[self.tokens_of(requests)]) for requests, hidden in computed]
            off_by = max(float((hidden - want).norm() / want.norm()) for hidden, want in wanted)
            if not off_by <= TOLERANCE:
                raise RuntimeError(f"{name} of {self.step.name} are off by {off_by:.2g}")
            for processors in self.processors:
                seconds = self.seconds(partial(self.compute_layers, halves), processors)
                way = {"split": name, "processors": processors, "seconds": seconds, "gain": whole_s / seconds - 1}
                found["splits"].append(way | {"difference": off_by})
        return found | self.apart(whole)

    def apart(self, whole: Part) -> dict[str, Any]:
        """Products alone, attention alone, and both at once without dependencies."""
        query = self.products_before(self.layers[0], whole.hidden)

        def products() -> None:
            for number in range(self.num_layers):
                layer = self.layers[number % WEIGHT_SETS]
                self.products_before(layer, whole.hidden)
                self.products_behind(layer, whole.hidden, query)

        def attention() -> None:
            for number in range(self.num_layers):
                whole.plan.attend(query, query, self.layers[number % WEIGHT_SETS].cache)

        found = {"products_s": self.seconds(products), "attention_s": self.seconds(attention)}
        both = partial(self.at_once, [products, attention], first_has_priority=True)
        at_once = [{"processors": part, "seconds": self.seconds(both, part)} for part in self.processors]
        both_s = min(way["seconds"] for way in at_once)
        longer, shorter = max(found.values()), min(found.values())
        return {**found, "at_once": at_once, "kappa": (both_s - longer) / shorter}

    # ---- the layers ----

    def part(self, requests: Requests) -> Part:
        chosen = np.array(requests)
        query_lens = np.array(self.step.query_lens)[chosen]
        seq_lens = query_lens + np.array(self.step.context_lens)[chosen]
        plan = self.attention.plan(query_lens, seq_lens, StepTables.of(self.tables[chosen]))
        return Part(plan, self.hidden[self.tokens_of(requests)])

    def tokens_of(self, requests: Requests) -> Tensor:
        """Rows of the step's tokens that belong to these requests."""
        ends = np.cumsum(self.step.query_lens)
        rows = [np.arange(ends[number] - self.step.query_lens[number], ends[number]) for number in requests]
        return torch.from_numpy(np.concatenate(rows)).to(self.device)

    def compute_layers(self, parts: Sequence[Part]) -> list[Tensor]:
        """Hidden states of each part. Several parts are computed at once, each on its own stream."""
        found: list[Tensor] = [part.hidden for part in parts]

        def compute(index: int) -> None:
            hidden = parts[index].hidden
            for number in range(self.num_layers):
                layer = self.layers[number % WEIGHT_SETS]
                query = self.products_before(layer, hidden)
                attended = parts[index].plan.attend(query, query, layer.cache)
                hidden = self.products_behind(layer, hidden, attended)
            found[index] = hidden

        self.at_once([partial(compute, index) for index in range(len(parts))])
        return found

    def products_before(self, layer: Layer, hidden: Tensor) -> Tensor:
        """The queries, [tokens, heads, head_dim]. Keys and values are computed, but not used."""
        shape = self.shape
        stacked = F.rms_norm(hidden, (shape.hidden,)) @ layer.qkv.t()
        return stacked[:, : shape.heads * shape.head_dim].view(-1, shape.heads, shape.head_dim)

    def products_behind(self, layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended.flatten(1) @ layer.out.t()
        gate, up = (F.rms_norm(hidden, (self.shape.hidden,)) @ layer.gate_up.t()).chunk(2, -1)
        return hidden + (F.silu(gate) * up) @ layer.down.t()

    # ---- running ----

    def at_once(self, works: Sequence[Callable[[], None]], *, first_has_priority: bool = False) -> None:
        """Runs each on its own stream, all after earlier work. Later work waits for all of them."""
        if self.device.type != "cuda" or len(works) == 1:
            for work in works:
                work()
            return
        current = torch.cuda.current_stream(self.device)
        priorities = [-1 if first_has_priority and number == 0 else 0 for number in range(len(works))]
        streams = [torch.cuda.Stream(self.device, priority=priority) for priority in priorities]
        for stream, work in zip(streams, works, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            current.wait_stream(stream)

    def seconds(self, work: Callable[[], object], processors: float = 1.0) -> float:
        """Seconds of one run. On a GPU it is a graph, which excludes the host's launch time."""
        if self.device.type != "cuda":
            start_s = time.perf_counter()
            work()
            return time.perf_counter() - start_s
        with products_on(processors, self.device):
            side = torch.cuda.Stream(self.device)
            with torch.cuda.stream(side):
                work()  # compiles kernels and lets libraries select theirs
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        return seconds_per_call(graph.replay, self.device, TARGET_S)


@contextlib.contextmanager
def products_on(share: float, device: torch.device) -> Iterator[None]:
    """Limits cuBLAS to kernels for this fraction of the device's multiprocessors; torch has no interface for that.

    Raises:
        RuntimeError: cuBLAS refuses.
    """
    if share == 1.0:
        yield
        return
    major = str(torch.version.cuda).partition(".")[0]
    set_target = ctypes.CDLL(f"libcublas.so.{major}").cublasSetSmCountTarget
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    count = round(share * torch.cuda.get_device_properties(device).multi_processor_count)
    if set_target(handle, ctypes.c_int(count)):
        raise RuntimeError(f"cuBLAS refuses {count} multiprocessors")
    try:
        yield
    finally:
        set_target(handle, ctypes.c_int(0))
