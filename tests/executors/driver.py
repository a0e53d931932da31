"""Tiny random checkpoints, and hand-made step plans that drive the executor without a scheduler."""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, ExecutorConfig
from neaptide.engine.interfaces import Executor, StepHandle
from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import SamplingParams
from neaptide.engine.process.arrivals import OnlineArrivals
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan, StepResult
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID
from neaptide.executors.torch.torch_executor import TorchExecutor

VOCAB = 128
GREEDY = SamplingParams(temperature=0.0)
EVERY_LOGPROB = SamplingParams(temperature=0.0, logprobs=VOCAB, prompt_logprobs=0)
GAPS = {"float32": 1e-3, "bfloat16": 5e-2}
"""Tokens must agree up to the first position where the reference's two best logits are this close, by dtype of ours."""
GAP = GAPS["float32"]


def write_checkpoint(directory: Path, **fields: Any) -> LlamaForCausalLM:
    """As ``write_family``, of Llama."""
    return cast(LlamaForCausalLM, write_family("llama", directory, **fields))


def write_family(
    family: str, directory: Path, *, max_shard_size: str = "1GB", spread: float = 0.3, **fields: Any
) -> PreTrainedModel:
    """Saves a random model with enough spread in its logits to have clear winners, and returns it (fp32, eval).

    Args:
        family: as ``transformers`` calls its ``model_type``.
        directory: to save it in.
        max_shard_size: of a file.
        spread: of the weights.
        fields: of its configuration.
    """
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    if family == "opt":
        shape |= {"ffn_dim": 80, "init_std": spread, "pad_token_id": 0}
    elif family in ("gpt2", "gpt_neox"):
        shape |= {"n_inner" if family == "gpt2" else "intermediate_size": 80, "initializer_range": spread}
    else:
        shape |= {"intermediate_size": 80, "num_key_value_heads": 2, "initializer_range": spread}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(shape | fields))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or ".ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def write_bfloat16_checkpoint(directory: Path, **fields: Any) -> LlamaForCausalLM:
    """Saves a random model in bf16 and returns it in fp32, with the same weights.

    Its layers disturb the residual stream less than those of ``write_checkpoint``, whose logits in bf16 are off by up
    to 0.3: here by 0.03, so that the gap rule can hold.
    """
    model = write_checkpoint(directory, spread=0.1, **fields)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
        model.lm_head.weight.normal_(0.0, 0.2)
    model.to(torch.bfloat16).save_pretrained(directory)
    return model.float()


def make_executor(
    directory: Path,
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    seed: int = 0,
    num_host_blocks: int = 0,
    cpu_kernels: str = "auto",
    batch_invariant: bool = False,
    quantization: str = "none",
    arrivals: OnlineArrivals | None = None,
) -> TorchExecutor:
    return TorchExecutor(
        ExecutorConfig(
            model_path=str(directory),
            device="cpu",
            dtype=dtype,
            num_threads=1,
            cpu_kernels=cpu_kernels,
            batch_invariant=batch_invariant,
            quantization=quantization,
        ),
        CacheConfig(block_size=block_size, num_blocks=num_blocks, num_host_blocks=num_host_blocks),
        MonotonicClock(),
        seed=seed,
        arrivals=arrivals,
    )


@dataclass
class Track:
    """One request as the driver sees it."""

    prompt: list[int]
    params: SamplingParams
    blocks: list[int]
    computed: int = 0
    shared_tokens: int = 0
    """Of the prompt, computed by others."""
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None
    sent: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class InFlight:
    """A step that has been submitted."""

    handle: StepHandle
    plan: StepPlan
    new_token: dict[str, int]
    """For each request that takes part, the index of its new token in the output."""


class Driver:
    """Plays the scheduler: hands out blocks in random order and runs the steps it is told to.

    With ``depth`` 1 a step is submitted before the result of the one before is in, and reads placeholders.
    """

    def __init__(self, executor: Executor, block_size: int = 16, seed: int = 0, depth: int = 0):
        self.executor = executor
        self.depth = depth
        self.in_flight: deque[InFlight] = deque()
        self.block_size = block_size
        self.free = list(range(executor.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tracks: dict[str, Track] = {}
        self.finished: list[str] = []
        self.steps = 0

    def add(
        self, request_id: str, prompt: list[int], params: SamplingParams = GREEDY, *, shared: list[int] | None = None
    ) -> Track:
        """``shared``: full blocks that hold the prompt's first tokens already."""
        shared_tokens = len(shared or []) * self.block_size
        track = Track(prompt, params, list(shared or []), computed=shared_tokens, shared_tokens=shared_tokens)
        self.tracks[request_id] = track
        return track

    def step(self, tokens: dict[str, int]) -> StepResult:
        """Computes the next ``tokens[request_id]`` tokens of each request; samples where it reaches the end. Returns
        the result of the oldest step in flight."""
        self.submit(tokens)
        return self.wait()

    def submit(self, tokens: dict[str, int]) -> None:
        new = [NewRequest(name, self.tracks[name].prompt, self.tracks[name].params) for name in self._unsent(tokens)]
        parts = [self._schedule(request_id, count) for request_id, count in tokens.items()]
        plan = StepPlan.of_parts(self.steps, parts, new, self.finished)
        self.finished = []
        self.steps += 1
        self.in_flight.append(InFlight(self.executor.submit(plan), plan, {}))
        for part in parts:
            track = self.tracks[part.request_id]
            track.computed += len(part.token_ids)
            self.in_flight[-1].new_token[part.request_id] = len(track.output)
            if part.sample:
                track.output.append(PLACEHOLDER_TOKEN_ID)

    def wait(self) -> StepResult:
        step = self.in_flight.popleft()
        result = step.handle.wait()
        sampled = result.tokens_by_id(step.plan)
        for request_id, index in step.new_token.items():
            track = self.tracks.get(request_id)
            if track is None or track.error is not None:
                continue  # it ended while this step was in flight
            track.error = result.errors.get(request_id)
            if track.error is not None:
                del track.output[index:]
                continue
            track.prompt_logprobs += result.prompt_logprobs.get(request_id, [])
            if request_id in sampled:
                track.output[index] = sampled[request_id]
            if request_id in result.logprobs:
                track.logprobs.append(result.logprobs[request_id])
        return result

    def run(self, num_tokens: int, chunk: int = 10_000) -> None:
        """Steps all requests together until each has ``num_tokens`` output tokens or an error."""
        while True:
            counts = {
                request_id: min(chunk, len(track.tokens) - track.computed)
                for request_id, track in self.tracks.items()
                if len(track.output) < num_tokens and track.error is None
            }
            if counts:
                self.submit(counts)
            elif not self.in_flight:
                return
            if not counts or len(self.in_flight) > self.depth:
                self.wait()

    def finish(self, request_id: str) -> None:
        self.free += self.tracks.pop(request_id).blocks
        self.finished.append(request_id)

    def _unsent(self, request_ids: Iterable[str]) -> list[str]:
        """Those that the executor has not heard of; it does now."""
        unsent = [request_id for request_id in request_ids if not self.tracks[request_id].sent]
        for request_id in unsent:
            self.tracks[request_id].sent = True
        return unsent

    def _schedule(self, request_id: str, count: int) -> ScheduledRequest:
        track = self.tracks[request_id]
        end = track.computed + count
        while len(track.blocks) * self.block_size < end:
            track.blocks.append(self.free.pop())
        new_tokens = track.tokens[track.computed : end]
        sample = end == len(track.tokens)
        return ScheduledRequest(request_id, new_tokens, track.computed, track.blocks, sample, len(track.output))


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocabulary] fp32."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def leading_agreement(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], gap: float = GAP) -> int:
    """Checks greedy output against the reference by the gap rule; returns the number of tokens compared."""
    logits = reference_logits(model, [*prompt, *output])[len(prompt) - 1 : -1]
    for position, token in enumerate(output):
        best = logits[position].topk(2)
        if float(best.values[0] - best.values[1]) < gap:
            return position
        assert token == int(best.indices[0]), f"output token {position}: {token} is not {int(best.indices[0])}"
    return len(output)


def assert_greedy(model: PreTrainedModel, track: Track, gap: float = GAP) -> int:
    """The same for a request of the driver."""
    return leading_agreement(model, track.prompt, track.output, gap)


def assert_logprobs(model: PreTrainedModel, driver: Driver, tolerance: float = 1e-4) -> None:
    """Each output position's whole distribution, and each prompt token's own, against the reference.

    Prompt tokens whose keys and values were there already have no record.
    """
    for track in driver.tracks.values():
        expected = torch.log_softmax(reference_logits(model, track.tokens), dim=-1)
        first = len(track.prompt) - 1 - len(track.prompt_logprobs)
        assert first == track.shared_tokens
        for position, record in enumerate(track.prompt_logprobs, first):
            assert record.token_id == track.prompt[position + 1]
            assert abs(record.logprob - float(expected[position, record.token_id])) <= tolerance
        for position, record in enumerate(track.logprobs):
            got = torch.empty(VOCAB)
            got[record.top_ids] = torch.tensor(record.top_logprobs)
            torch.testing.assert_close(got, expected[len(track.prompt) - 1 + position], atol=tolerance, rtol=0)
