"""vLLM's real scheduler and KV manager on a virtual clock: tokens are made up, and no model is loaded.

Runs in an interpreter with vLLM.
"""

import json
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from neaptide_vllm.scheduling.coserving import AsyncCoServing, SyncCoServing

VOCABULARY = 8000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
BEGIN_S = 1000.0
IDLE_S = 1e-3


@dataclass(frozen=True)
class Setup:
    """A server. ``policy`` is ``ours``, or one of vLLM's own."""

    policy: str = "ours"
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    num_blocks: int = 2912
    block_size: int = 16
    max_model_len: int = 1024
    is_async: bool = False
    has_prefix_cache: bool = True
    settings: dict[str, Any] | None = None
    """``additional_config["neaptide"]``."""


@dataclass
class Token:
    """An output token of a request."""

    request_id: str
    token_id: int
    time_s: float
    is_last: bool


def token_at(request_id: str, position: int) -> int:
    """The token that a request makes at a position of its output, whatever runs beside it."""
    return 10 + crc32(f"{request_id}/{position}".encode()) % (VOCABULARY - 10)


class VirtualServer:
    """A scheduler of vLLM with a clock that advances by the time of each step.

    Args:
        step_s: seconds of a step, given its parts: computed tokens and context of each.
    """

    def __init__(self, setup: Setup, step_s: Callable[[Sequence[tuple[int, int]]], float]) -> None:
        self.now_s = BEGIN_S
        self.setup = setup
        self.scheduler = _scheduler(setup, lambda: self.now_s)
        self._step_s = step_s
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(setup.block_size, sha256) if setup.has_prefix_cache else None
        self._in_flight: deque[tuple[SchedulerOutput, dict[str, int | None], float]] = deque()
        self._depth = 2 if setup.is_async else 1
        self.contexts: dict[str, int] = {}
        """Computed tokens of each request of the last step, before it."""
        self._free_s = BEGIN_S
        """When the device has done what is in flight."""

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        max_tokens: int,
        priority: int,
        arrival_s: float | None = None,
        targets: dict[str, Any] | None = None,
    ) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=targets)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            arrival_time=self.now_s if arrival_s is None else arrival_s,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> tuple[SchedulerOutput, list[Token]]:
        """Schedules a step and takes in the oldest outcome if as many as may be are in flight. The clock advances to
        its end; without work, a little."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        parts: list[tuple[int, int]] = []
        positions: dict[str, int | None] = {}
        self.contexts = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            context = self.contexts[request_id] = request.num_computed_tokens - num_tokens
            parts.append((num_tokens, context))
            placeholder = 1 if request.num_output_placeholders else 0
            position = request.num_output_tokens + request.num_output_placeholders - placeholder
            positions[request_id] = None if request.is_prefill_chunk else position
        self._free_s = max(self._free_s, self.now_s) + (self._step_s(parts) if parts else 0.0)
        self._in_flight.append((output, positions, self._free_s))
        tokens: list[Token] = []
        while len(self._in_flight) >= self._depth or (self._in_flight and not parts):
            tokens += self._take_in(*self._in_flight.popleft())
        if not parts:
            self.now_s += IDLE_S
        return output, tokens

    def _take_in(self, output: SchedulerOutput, positions: dict[str, int | None], end_s: float) -> list[Token]:
        self.now_s = max(self.now_s, end_s)
        ids = list(positions)
        sampled = [[] if positions[each] is None else [token_at(each, positions[each])] for each in ids]
        outcome = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        groups = self.scheduler.update_from_output(output, outcome)
        return [
            Token(one.request_id, token_id, self.now_s, one.finish_reason is not None)
            for group in groups.values()
            for one in group.outputs
            for token_id in one.new_token_ids
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every request is in one place and the blocks add up."""
        scheduler = self.scheduler
        running = [request.request_id for request in scheduler.running]
        queued = [request.request_id for queue in _queues(scheduler) for request in queue]
        places = running + queued
        assert len(places) == len(set(places)), "a request is in two places"
        assert set(places) == set(scheduler.requests), "a request is in no place"
        assert len(running) <= self.setup.max_num_seqs
        manager = scheduler.kv_cache_manager
        held = {
            block.block_id
            for request_id in running
            for group in manager.get_blocks(request_id).blocks
            for block in group
        }
        free = manager.block_pool.get_num_free_blocks()
        assert free + len(held) == self.setup.num_blocks - 1, f"{free} free and {len(held)} held blocks"


def _queues(scheduler: Scheduler) -> list[Any]:
    return [scheduler.waiting, scheduler.kv_holding_waiting]


def _scheduler(setup: Setup, clock: Callable[[], float]) -> Scheduler:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        model = ModelConfig(
            model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=setup.max_model_len
        )
    cache = CacheConfig(block_size=setup.block_size, enable_prefix_caching=setup.has_prefix_cache)
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.max_model_len,
            is_encoder_decoder=False,
            policy="fcfs" if setup.policy == "ours" else setup.policy,
            enable_chunked_prefill=True,
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        additional_config={"neaptide": setup.settings or {}},
    )
    config.scheduler_config.async_scheduling = setup.is_async  # vLLM turns it off on a CPU
    cache.num_gpu_blocks = setup.num_blocks
    spec = FullAttentionSpec(block_size=setup.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    kinds = {"ours": (SyncCoServing, AsyncCoServing)}.get(setup.policy, (Scheduler, AsyncScheduler))
    kind = kinds[setup.is_async]
    if setup.policy == "ours":
        attributes = {"clock": staticmethod(clock), "wall_clock": staticmethod(clock), "fits_in_background": False}
        kind = type(kind.__name__, (kind,), attributes)
    return kind(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block_size,
        hash_block_size=setup.block_size,
        log_stats=False,
    )
