"""The torch executor on a device, against a dense reference on the same device."""

import contextlib
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import GAP
from benchmarks.gpu.dense_reference import dense_logits
from benchmarks.gpu.random_llama import TINY, LlamaShape, write_model_dir
from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, ExecutorConfig
from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan
from neaptide.executors.torch.torch_executor import TorchExecutor

BLOCK_SIZE = 16
NUM_BLOCKS = 512
LOGPROB_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
DTYPES = torch.float32, torch.bfloat16
PROMPT_TOKENS = (1, 2, 15, 16, 17, 70, 129, 333)
LONG_PROMPTS = (960,) * 8
"""Tokens of one step. Its activations need about 60 MB in fp32, but only ``SPARE_BYTES`` are left."""
SPARE_BYTES = 24 << 20
FIRST_TOKEN_ID = 3


@dataclass
class Track:
    """One request of a scenario."""

    prompt: list[int]
    start_step: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Scenario:
    """A way to cut the same prompts into steps."""

    name: str
    chunk: int
    """Most tokens of one request in a step."""
    stagger: int
    """Steps between the starts of two requests; 0 starts all together."""


SCENARIOS = (
    Scenario("prefill", chunk=10_000, stagger=0),
    Scenario("chunked", chunk=17, stagger=0),
    Scenario("mixed", chunk=50, stagger=2),
)


def check_correctness(
    device: torch.device,
    num_outputs: int,
    *,
    gpu_kernels: str = "auto",
    scenarios: Sequence[Scenario] = SCENARIOS,
    prompt_tokens: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> dict[str, Any]:
    """Runs every scenario in fp32 and bf16.

    Greedy tokens must equal the reference's up to the first position where its two best logits are closer than the gap.
    Every log-probability must be within the tolerance. The reference computes in fp32 from the same weights, so that
    bf16 is compared with exact results and not with another rounding.
    """
    cases = []
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as directory:
            weights = write_model_dir(Path(directory), TINY, dtype, torch.device("cpu"))
            weights = {name: weight.to(device) for name, weight in weights.items()}
            for scenario in scenarios:
                executor = _executor(Path(directory), device, dtype, gpu_kernels)
                tracks = _run(executor, scenario, num_outputs, prompt_tokens or PROMPT_TOKENS)
                cases.append(
                    {"dtype": str(dtype).removeprefix("torch."), "scenario": scenario.name}
                    | compare(weights, TINY, tracks, dtype)
                )
    return {"ok": all(case["ok"] for case in cases), "cases": cases}


def check_in_pieces(device: torch.device, num_outputs: int) -> dict[str, Any]:
    """Runs a step whose prompts need more memory than the GPU has left. Its tokens must equal the reference's, and it
    must be computed in pieces.

    Raises:
        RuntimeError: the memory was sufficient.
    """
    with tempfile.TemporaryDirectory() as directory:
        weights = write_model_dir(Path(directory), TINY, torch.float32, torch.device("cpu"))
        weights = {name: weight.to(device) for name, weight in weights.items()}
        executor = _executor(Path(directory), device, torch.float32, "auto")
        with little_memory(device):
            tracks = _run(executor, Scenario("in pieces", chunk=10_000, stagger=0), num_outputs, LONG_PROMPTS)
        limit = executor._limit.max_tokens
    if limit is None:
        raise RuntimeError("memory did not run out: nothing was computed in pieces")
    found = {"dtype": "float32", "scenario": "in pieces", "max_tokens": limit}
    return found | compare(weights, TINY, tracks, torch.float32)


@contextlib.contextmanager
def little_memory(device: torch.device) -> Iterator[None]:
    """Leaves this process ``SPARE_BYTES`` more of the GPU's memory."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + SPARE_BYTES) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _executor(directory: Path, device: torch.device, dtype: torch.dtype, gpu_kernels: str) -> TorchExecutor:
    return TorchExecutor(
        ExecutorConfig(
            model_path=str(directory),
            device=device.type,
            dtype=str(dtype).removeprefix("torch."),
            gpu_kernels=gpu_kernels,
        ),
        CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
        MonotonicClock(),
    )


def _run(executor: TorchExecutor, scenario: Scenario, num_outputs: int, prompt_tokens: Sequence[int]) -> list[Track]:
    rng = random.Random(0)
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    tracks = [
        Track(rng.choices(range(FIRST_TOKEN_ID, TINY.vocab), k=tokens), index * scenario.stagger)
        for index, tokens in enumerate(prompt_tokens)
    ]
    step = 0
    while any(len(track.output) < num_outputs for track in tracks):
        _step(executor, tracks, step, scenario, num_outputs, free)
        step += 1
    executor.close()
    return tracks


def _step(
    executor: TorchExecutor, tracks: list[Track], step: int, scenario: Scenario, num_outputs: int, free: list[int]
) -> None:
    parts: list[ScheduledRequest] = []
    new: list[NewRequest] = []
    for index, track in enumerate(tracks):
        if step < track.start_step or len(track.output) >= num_outputs:
            continue
        request_id, tokens = str(index), track.prompt + track.output
        count = min(scenario.chunk, len(tokens) - track.computed)
        end = track.computed + count
        while len(track.blocks) * BLOCK_SIZE < end:
            track.blocks.append(free.pop())
        if not track.computed:
            params = SamplingParams(temperature=0.0, logprobs=TINY.vocab, ignore_eos=True)
            new.append(NewRequest(request_id, track.prompt, params))
        parts.append(
            ScheduledRequest(
                request_id,
                tokens[track.computed : end],
                track.computed,
                track.blocks,
                end == len(tokens),
                len(track.output),
            )
        )
    plan = StepPlan.of_parts(step, parts, new)
    result = executor.submit(plan).wait()
    if result.errors:
        raise RuntimeError(f"the executor reports {result.errors}")
    sampled = result.tokens_by_id(plan)
    for part in parts:
        track = tracks[int(part.request_id)]
        track.computed += len(part.token_ids)
        if part.request_id in sampled:
            track.output.append(sampled[part.request_id])
            track.logprobs.append(result.logprobs[part.request_id])


def compare(weights: dict[str, Tensor], shape: LlamaShape, tracks: list[Track], dtype: torch.dtype) -> dict[str, Any]:
    """Compares tokens by the gap rule, and finds the largest difference of any log-probability."""
    compared, total, worst = 0, 0, 0.0
    wrong: list[dict[str, Any]] = []
    for track in tracks:
        logits = dense_logits(weights, shape, track.prompt + track.output)[len(track.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        ours = torch.full_like(expected, float("nan"))
        for position, record in enumerate(track.logprobs):
            ours[position, record.top_ids] = torch.tensor(record.top_logprobs, device=expected.device)
        off_by = float((ours - expected).abs().max())
        worst = max(worst, float("inf") if math.isnan(off_by) else off_by)
        total += len(track.output)
        agreeing, difference = compare_tokens(logits, track.output, GAP[dtype])
        compared += agreeing
        wrong += [] if difference is None else [{"prompt_tokens": len(track.prompt)} | difference]
    return {
        "ok": not wrong and worst <= LOGPROB_TOLERANCE[dtype] and compared > 0,
        "tokens": total,
        "tokens_compared": compared,
        "gap": GAP[dtype],
        "wrong": wrong,
        "max_logprob_difference": worst,
        "logprob_tolerance": LOGPROB_TOLERANCE[dtype],
    }


def compare_tokens(logits: Tensor, tokens: list[int], gap: float) -> tuple[int, dict[str, int] | None]:
    """Number of greedy tokens that agree with the logits [tokens, vocab], up to the first close call; and the first
    difference."""
    for position, token in enumerate(tokens):
        values, ids = (part.tolist() for part in logits[position].topk(2))
        if values[0] - values[1] < gap:
            return position, None
        if token != ids[0]:
            return position, {"position": position, "ours": token, "want": ids[0]}
    return len(tokens), None
