"""Runs steps with torch, on a CPU or a CUDA device."""

import logging
import math
import pkgutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from neaptide.engine.arrays import IntArray
from neaptide.engine.clock import Clock
from neaptide.engine.config import CacheConfig, ExecutorConfig, SharedReads
from neaptide.engine.params import INVALID_TOKEN, OUT_OF_MEMORY, SamplingParams
from neaptide.engine.process.arrivals import OnlineArrivals
from neaptide.engine.steps.plan import NewRequest, ScheduledRequest, StepPlan, StepResult
from neaptide.executors.grammar_masks import GrammarMasks, StepFill
from neaptide.executors.step_mask import Constrained, Patience, StepMask
from neaptide.executors.torch.batch_invariance import pick_invariant_dtype, try_invariance, use_invariant_products
from neaptide.executors.torch.device import device_name, free_bytes, pick_device, pick_dtype
from neaptide.executors.torch.in_pieces import Piece, Remainder, TokenLimit, free_cached, is_out_of_memory
from neaptide.executors.torch.input_batch import InputBatch, build_input_batch
from neaptide.executors.torch.layers.linear import choose_products
from neaptide.executors.torch.layers.quantized import quantizes
from neaptide.executors.torch.model_runner import ModelRunner
from neaptide.executors.torch.models.base import GivingUp, StepAborted, TorchModel
from neaptide.executors.torch.placeholders import SampledRow
from neaptide.executors.torch.request_state import RequestState
from neaptide.executors.torch.sampling.logits_edits import Allowed
from neaptide.executors.torch.sampling.logprobs import score
from neaptide.executors.torch.sampling.sampler import sample
from neaptide.executors.torch.step_results import Pending, PromptScores, SampledTokens, TokenScores, TorchHandle
from neaptide.executors.torch.weights import check_shapes, load_weights
from neaptide.kernels.choice import Kernels, choose_kernels
from neaptide.kernels.paged_attention import Shape
from neaptide.kernels.paged_attention.work_list import MIN_SHARED_TOKENS
from neaptide.kernels.transfer import HostCopy, to_device
from neaptide.models.checkpoint import load_model_config, resolve_model
from neaptide.models.registry import FAMILIES

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_KV_BYTES = GIB
GPU_SHARE = 0.8
"""Fraction of the free memory for KV blocks. Activations, which grow with the step's tokens, use the rest."""

ALONE_S, ALONE_FACTOR = 0.5, 4.0
"""Wait for masks in a step that can sample nothing without them: seconds, as long as no chat arrives.

If arrivals cannot be detected, it is this multiple of the usual limit.
"""

_PROMPT_SCORE_ROWS = 256
"""Prompt positions scored at once. This bounds the logits to 128 MB for a vocabulary of 128k."""


class TorchExecutor:
    """Executor for a checkpoint of any family in ``neaptide.models.registry``.

    On CUDA, ``model_s`` is the time to launch the model's work, and ``sample_s`` includes waiting for it. One
    synchronisation per step leaves no host time in between to separate them.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        cache: CacheConfig,
        clock: Clock,
        *,
        seed: int = 0,
        arrivals: OnlineArrivals | None = None,
    ):
        """Loads the model and allocates the KV cache.

        Args:
            config: model, device, dtype and threads.
            cache: block size and number of blocks, or the memory for them.
            clock: times the parts of a step.
            seed: for the random streams of requests without a seed.
            arrivals: online arrivals, which abort abortable steps.

        Raises:
            UnsupportedModelError: the model cannot be served.
            ValueError: device, dtype, kernels, batch invariance or quantization is not available, or not one block
                fits.
        """
        if config.num_threads > 0:
            torch.set_num_threads(config.num_threads)
        model_dir = resolve_model(config.model_path)
        self.model_config = load_model_config(model_dir).served(config.max_model_len, config.eos_token_ids)
        self.device = pick_device(config.device)
        self._is_invariant = config.batch_invariant
        if self._is_invariant:
            self.dtype = pick_invariant_dtype(config, self.device)
        else:
            self.dtype = pick_dtype(config.dtype, self.model_config.dtype, self.device)
        self._clock, self._arrivals = clock, arrivals
        self._seed, self._quantization = seed, config.quantization
        self._states: dict[str, RequestState] = {}
        self._constrained: set[str] = set()
        """Requests with a grammar."""
        self._limit = TokenLimit()
        model = self.model_config
        self._grammar_masks = GrammarMasks(model_dir, model.vocab_size, model.eos_token_ids)
        self._grammar_masks.warm_up()
        self._check_room(config, cache)
        with torch.inference_mode():
            kernels = choose_kernels(
                Shape(model.num_heads, model.num_kv_heads, model.head_dim, cache.block_size),
                dtype=self.dtype,
                device=self.device,
                cpu_kernels=config.cpu_kernels,
                gpu_kernels=config.gpu_kernels,
                batch_invariant=self._is_invariant,
                now_s=self._clock.now,
            )
            layers = self._load(config, model_dir, kernels)
            self._num_blocks = self._count_blocks(cache)  # after the weights: on a GPU the cache gets what they leave
            self.num_host_blocks = cache.num_host_blocks or cache.host_cache_bytes // self._block_bytes(cache)
            self._runner = ModelRunner(layers, self._num_blocks, kernels, num_host_blocks=self.num_host_blocks)
            if self._is_invariant:
                try_invariance(self._runner)
        logger.info("%s on %s in %s, %d KV blocks", model_dir, self.device, self.dtype_name, self._num_blocks)
        self._warm_up()

    def _load(self, config: ExecutorConfig, model_dir: Path, kernels: Kernels) -> TorchModel:
        """The model with its weights and its chosen products."""
        may_quantize = quantizes(config, self.dtype, self.device)
        model_class: type[TorchModel] = pkgutil.resolve_name(FAMILIES[self.model_config.architecture].torch_class)
        check_shapes(model_class(self.model_config, self.dtype, torch.device("meta"), kernels.layer_ops), model_dir)
        layers = model_class(self.model_config, self.dtype, self.device, kernels.layer_ops)
        load_weights(layers, model_dir)
        if self._is_invariant:
            use_invariant_products(layers.linears())
        else:
            choose_products(layers.linears(), config.cpu_kernels, self._clock, may_quantize=may_quantize)
        return layers

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def dtype_name(self) -> str:
        """For example ``float32``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        """Product name of the device."""
        return device_name(self.device)

    @property
    def num_threads(self) -> int:
        """Compute threads; 0 on a GPU."""
        return torch.get_num_threads() if self.device.type == "cpu" else 0

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model_config.kv_bytes_per_token(self.dtype.itemsize)

    @property
    def shared_reads(self) -> SharedReads | None:
        """Prefixes that the attention kernel reads once for several decodes; None if every decode reads its own."""
        count = self._runner.kernels.decodes_per_read
        return SharedReads(count, MIN_SHARED_TOKENS) if count > 1 else None

    @property
    def build(self) -> str:
        """The kind of kernels and quantization; profiles measured with others do not apply."""
        kind = self._runner.kernels.kind
        if kind == "triton":
            return "Triton kernels"
        if self._is_invariant:
            return "C kernels, batch-invariant"
        parts = ["C kernels"] * (kind == "native") + [self._quantization] * (self._quantization != "none")
        return ", ".join(parts)

    def touch_blocks(self, count: int) -> None:
        """Writes zeros to the first ``count`` KV blocks.

        On a CPU all untouched memory is one page of zeros, which reads faster than real memory. Steps timed over such
        blocks would look too cheap.
        """
        with torch.inference_mode():
            for layer in self._runner.kv_cache:
                layer[:count].zero_()

    def submit(self, plan: StepPlan) -> TorchHandle:
        """Runs the step on a CPU, starts it on CUDA.

        On CUDA the host waits only if a request with penalties or a grammar reads a token that an earlier step still
        samples. The host counts penalties and follows grammars. For a grammar it waits after the model's work has been
        launched.
        """
        for request_id in plan.finished_ids:
            state = self._states.pop(request_id, None)
            if request_id in self._constrained and state is not None and state.follower is not None:
                self._constrained.discard(request_id)
                self._grammar_masks.leave(state.follower)
        for request in plan.new_requests:
            state = RequestState(request, self.model_config.eos_token_ids, self._seed)
            self._states[request.request_id] = state
            if state.follower is not None:
                self._constrained.add(request.request_id)
                self._grammar_masks.compile(state.follower)
        pending = Pending(StepResult.of(plan))
        with torch.inference_mode():
            pending.saves = self._runner.save(plan.saves)
            self._runner.load(plan.loads)
            if plan.slot_copies is not None:
                pending.saves += self._runner.copy_slots(plan.slot_copies)
            if len(plan):
                self._run(plan, pending)
        pending.result.grammar_bytes = self._grammar_masks.num_bytes
        return TorchHandle(pending, self._clock)

    @property
    def abortable_steps(self) -> bool:
        """Whether the executor checks for online arrivals while it computes. A GPU launches all layers at once."""
        return self._arrivals is not None and self.device.type == "cpu"

    def close(self) -> None:
        """Drops weights, cache and request state. The executor cannot be used afterwards."""
        self._states.clear()
        self._grammar_masks.close()
        if hasattr(self, "_runner"):
            self._runner.close()
            del self._runner

    def _run(self, plan: StepPlan, pending: Pending) -> None:
        """Computes the step at once, or in pieces if memory does not suffice."""
        start_s = self._clock.now()
        self._count_tokens(plan)
        mask = self._fill_mask(plan) if self._constrained else None
        result, limit, rest = pending.result, self._limit, Remainder(plan)
        limit.begin_step(int(plan.num_tokens.sum()))
        result.prepare_s = self._clock.now() - start_s
        while (piece := rest.next_piece(limit.max_tokens)) is not None:
            try:
                is_computed = self._fits(piece, pending, mask)
            except StepAborted:
                result.is_aborted = True
                return
            if is_computed:
                limit.fitted(piece.num_tokens)
                rest.done(piece)
                continue
            result.memory_ran_out += 1
            if piece.num_tokens > 1:
                now_at_once = limit.lower(piece.num_tokens)
                logger.warning(
                    "%d tokens at once do not fit into memory: steps now compute up to %d tokens at once. If this "
                    "persists, lower max_num_batched_tokens or kv_cache_gib",
                    piece.num_tokens,
                    now_at_once,
                )
            else:
                request_id = piece.plan.request_ids[0]
                logger.error("request %s failed: not enough memory to compute one of its tokens", request_id)
                result.errors[request_id] = OUT_OF_MEMORY
                rest.give_up(piece.parts)
                limit.take_back()

    def _fits(self, piece: Piece, pending: Pending, mask: StepFill | None) -> bool:
        """Computes a piece; False if memory ran out.

        Raises:
            StepAborted: see ``ModelRunner.hidden_states``.
        """
        found = Pending(StepResult.of(piece.plan))
        try:
            self._compute(piece.plan, found, mask)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            pending.take(found, piece.parts)
            return True
        free_cached(self.device)  # the failed attempt's memory is free only after its error is gone
        return False

    def _compute(self, plan: StepPlan, pending: Pending, mask: StepFill | None) -> None:
        start_s = self._clock.now()
        runner, result = self._runner, pending.result
        batch = build_input_batch(
            plan, runner.plan_attention, self.model_config.vocab_size, self.device, self._sampled_token
        )
        result.errors.update(dict.fromkeys(batch.invalid, INVALID_TOKEN))
        prepared_s = self._clock.now()
        giving_up = None
        if self._arrivals is not None and plan.abortable_share > 0:
            giving_up = GivingUp(self._arrivals, plan.abortable_share)
        hidden = runner.hidden_states(batch, giving_up)
        sampling = np.flatnonzero(plan.sample[batch.parts])
        logits = runner.logits(hidden, batch.last_rows[sampling].tolist()) if len(sampling) else None
        computed_s = self._clock.now()
        if logits is not None:
            self._sample(plan, batch.parts[sampling], logits, pending, mask)
        self._score_prompts(plan, batch, hidden, pending)
        result.prepare_s = prepared_s - start_s
        result.model_s = computed_s - prepared_s
        result.sample_s = self._clock.now() - computed_s

    def _count_tokens(self, plan: StepPlan) -> None:
        """Counts the step's tokens for requests with penalties."""
        for part, request_id in enumerate(plan.request_ids):
            state = self._states[request_id]
            if state.needs_counts and not _is_void(state, plan, part):
                start, count = int(plan.num_computed[part]), int(plan.num_tokens[part])
                state.observe(plan.table.tokens[plan.rows[part], start : start + count].tolist(), start)

    def _fill_mask(self, plan: StepPlan) -> StepFill | None:
        """Starts computing the masks of the step's sampling requests with a grammar."""
        constrained: list[Constrained] = []
        for part in np.flatnonzero(plan.sample).tolist():
            state = self._states[plan.request_ids[part]]
            if state.follower is not None and not _is_void(state, plan, part):
                state.late_position = -1
                num_prompt_tokens = len(state.prompt_token_ids)
                constrained.append(Constrained.of(plan, part, state.follower, num_prompt_tokens, state.recent_tokens))
        return self._grammar_masks.fill(constrained) if constrained else None

    def _sample(self, plan: StepPlan, parts: IntArray, logits: Tensor, pending: Pending, mask: StepFill | None) -> None:
        """Samples ``parts`` of the plan, one row of ``logits`` each."""
        request_ids = [plan.request_ids[part] for part in parts.tolist()]
        states = [self._states[request_id] for request_id in request_ids]
        output_positions = plan.output_position[parts].tolist()
        allowed = None
        if mask is not None:
            patience = self._patience(plan, is_alone=len(mask.request_ids) == len(parts))
            allowed = self._allowed(mask.collect(patience), request_ids, output_positions, pending)
        sampled = sample(logits, states, output_positions, allowed)
        on_host = HostCopy(sampled)
        pending.sampled.append(SampledTokens(request_ids, parts, on_host))
        for row, (state, output_position) in enumerate(zip(states, output_positions, strict=True)):
            state.recent_tokens.keep(output_position, SampledRow(sampled.token_ids, on_host, row))
        wanted = [(row, s.params.logprobs) for row, s in enumerate(states) if s.params.logprobs is not None]
        if wanted:
            rows = to_device(torch.tensor([row for row, _ in wanted]), self.device)
            tops = [top for _, top in wanted]
            scored = score(logits[rows], sampled.token_ids[rows], max(tops))
            pending.scores.append(TokenScores([request_ids[row] for row, _ in wanted], tops, HostCopy(scored)))

    def _patience(self, plan: StepPlan, is_alone: bool) -> Patience:
        arrivals = self._arrivals
        if arrivals is None:
            return Patience(plan.mask_limit_s, is_alone, ALONE_FACTOR * plan.mask_limit_s)
        return Patience(plan.mask_limit_s, is_alone, ALONE_S, lambda: arrivals.are_on_their_way)

    def _allowed(
        self, mask: StepMask, request_ids: list[str], output_positions: list[int], pending: Pending
    ) -> Allowed | None:
        """The masks of these requests; None if none has a grammar.

        A mask covers the whole step, and a piece may have other requests.
        """
        for request_id, error in mask.errors.items():
            pending.result.errors.setdefault(request_id, error)
        pending.result.late.update(mask.late)
        pending.result.mask_s = mask.waited_s
        for row, request_id in enumerate(request_ids):
            if request_id in mask.late:
                self._states[request_id].late_position = output_positions[row]
        place = {request_id: index for index, request_id in enumerate(mask.request_ids)}
        rows = [row for row, request_id in enumerate(request_ids) if request_id in place]
        if not rows:
            return None
        bits = mask.bits[[place[request_ids[row]] for row in rows]]
        return Allowed(rows, to_device(torch.from_numpy(bits), self.device))

    def _score_prompts(self, plan: StepPlan, batch: InputBatch, hidden: Tensor, pending: Pending) -> None:
        """Scores prompt token p + 1 at each position p of the step, for requests that want prompt log-probabilities."""
        for index, request_id in enumerate(batch.request_ids):
            state = self._states[request_id]
            top = state.params.prompt_logprobs
            if top is None:
                continue
            part = batch.parts[index]
            first = int(plan.num_computed[part])
            last = min(first + int(plan.num_tokens[part]), len(state.prompt_token_ids) - 1)
            if first >= last:
                continue
            row = int(batch.query_starts[index])
            targets = to_device(torch.tensor(state.prompt_token_ids[first + 1 : last + 1]), self.device)
            for begin in range(0, last - first, _PROMPT_SCORE_ROWS):
                scored = targets[begin : begin + _PROMPT_SCORE_ROWS]
                logits = self._runner.model.logits(hidden[row + begin : row + begin + len(scored)])
                finite = torch.isfinite(logits).all()
                on_host = HostCopy((*score(logits, scored, top), finite))
                pending.prompt_scores.append(PromptScores(request_id, top, on_host))

    def _sampled_token(self, request_id: str, position: int) -> SampledRow | None:
        """Device location of the request's token at this position of prompt and output, if it was sampled recently."""
        state = self._states[request_id]
        return state.recent_tokens.at(position - len(state.prompt_token_ids))

    def _check_room(self, config: ExecutorConfig, cache: CacheConfig) -> None:
        """Refuses a context that the cache cannot hold, before weights or tables are built for it.

        Raises:
            ValueError: the context is too long.
        """
        if cache.num_blocks is not None:
            return
        num_tokens = self._kv_bytes(cache) // self._block_bytes(cache) * cache.block_size
        if num_tokens < config.max_model_len:
            raise ValueError(
                f"the KV cache holds {num_tokens} tokens, fewer than one request of max_model_len = "
                f"{config.max_model_len}; raise kv_cache_gib or lower max_model_len"
            )

    def _block_bytes(self, cache: CacheConfig) -> int:
        return cache.block_size * self.model_config.kv_bytes_per_token(self.dtype.itemsize)

    def _kv_bytes(self, cache: CacheConfig) -> int:
        """Memory of the KV cache: the given size, else a share of what the GPU has free now."""
        if cache.kv_cache_bytes is not None:
            return cache.kv_cache_bytes
        free = free_bytes(self.device) if self.device.type == "cuda" else None
        return CPU_KV_BYTES if free is None else int(GPU_SHARE * free)

    def _count_blocks(self, cache: CacheConfig) -> int:
        if cache.kv_cache_bytes is not None:
            _require_room(cache.kv_cache_bytes, self.device)
        kv_cache_bytes = self._kv_bytes(cache)
        num_blocks = cache.num_blocks
        if num_blocks is None:
            num_blocks = kv_cache_bytes // self._block_bytes(cache)
        if num_blocks < 1:
            raise ValueError(f"kv_cache_bytes {kv_cache_bytes} is too small for one block of {cache.block_size} tokens")
        return num_blocks

    def _warm_up(self) -> None:
        """Runs one prefill and one decode in block 0, so that the first request does not pay for lazy set-up."""
        request_id = "warm-up"
        new = NewRequest(request_id, [0], SamplingParams(temperature=0.0))
        steps = [ScheduledRequest(request_id, [0], position, [0], True, position) for position in range(2)]
        if self._runner.block_size < 2 or self.model_config.max_position_embeddings < 2:
            steps = steps[:1]
        with torch.inference_mode():
            self._runner.record_graphs()
        for number, scheduled in enumerate(steps):
            self.submit(StepPlan.of_parts(-1, [scheduled], [new] if number == 0 else [])).wait()
        self._states.clear()


def _is_void(state: RequestState, plan: StepPlan, part: int) -> bool:
    """Whether the part follows a token that was not sampled because its mask was late. Its result is dropped."""
    return 0 <= state.late_position < int(plan.output_position[part])


def _require_room(kv_cache_bytes: int, device: torch.device) -> None:
    free = free_bytes(device)
    if free is not None and kv_cache_bytes > free:
        free_gib = math.floor(10 * free / GIB) / 10  # rounded down, never more than there is
        raise ValueError(
            f"a KV cache of {kv_cache_bytes / GIB:g} GiB does not fit: {device} has {free_gib:.1f} GiB free after the "
            "weights; lower kv_cache_gib"
        )
