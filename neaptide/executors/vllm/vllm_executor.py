"""Runs steps on vLLM's workers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.engine.params import INVALID_TOKEN
from neaptide.engine.steps.plan import NewRequest, StepPlan, StepResult
from neaptide.executors.grammar_masks import GrammarMasks
from neaptide.executors.torch.device import device_name
from neaptide.executors.vllm.arguments import describe
from neaptide.executors.vllm.collect import collect
from neaptide.executors.vllm.grammars import StepGrammars
from neaptide.executors.vllm.prompt_scores import ScoredChunk, chunks_to_score, collect_scores
from neaptide.executors.vllm.runner_state import NULL_BLOCKS
from neaptide.executors.vllm.sampling import draw_seed, is_random, to_vllm
from neaptide.executors.vllm.scheduler_output import RunnerKind, Translator
from neaptide.executors.vllm.tensor_parallel import recover
from neaptide.executors.vllm.worker import (
    copy_blocks,
    finish_saves,
    place_generators,
    reserve_host_blocks,
    score_prompts,
    take_scores,
    zero_blocks,
)

logger = logging.getLogger(__name__)


class VllmExecutor:
    """Implements ``ProfiledExecutor`` with vLLM's workers.

    Args:
        engine: vLLM's ``EngineCore``, started.
        eos_token_ids: of the model.
        masks: grammar masks of the model.
    """

    def __init__(
        self, engine: Any, config: EngineConfig, clock: Clock, eos_token_ids: tuple[int, ...], masks: GrammarMasks
    ) -> None:
        self._engine = engine
        self._workers = engine.model_executor
        self._vllm_config = engine.vllm_config
        self._arguments = config.executor.arguments
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._is_v2 = bool(self._vllm_config.use_v2_model_runner)
        is_async = bool(self._vllm_config.scheduler_config.async_scheduling)
        self.is_asynchronous = is_async or not isinstance(self._workers, UniProcExecutor)
        """Whether ``submit`` returns before the step is done. The workers are then separate processes or run on
        a GPU."""
        vocab_size = self._vllm_config.model_config.get_vocab_size()
        self.translator = Translator(RunnerKind(self._is_v2, is_async, vocab_size), self._to_params)
        self.grammars = StepGrammars(masks)
        masks.warm_up()
        self._max_step_tokens: int = self._vllm_config.scheduler_config.max_num_batched_tokens
        self._num_vllm_blocks: int = self._vllm_config.cache_config.num_gpu_blocks
        self._silence: TimeoutError | None = None
        """Set if worker processes did not answer in time.

        Answers carry no ids, so a late answer would be taken for the answer to a later question.
        """
        self._num_steps = 0
        """Steps sent to the workers."""
        cache = config.cache
        block_bytes = self.block_size * self.kv_bytes_per_token
        self.num_host_blocks = cache.num_host_blocks or cache.host_cache_bytes // block_bytes
        if self.num_host_blocks:
            self._workers.collective_rpc(reserve_host_blocks, args=(self._num_vllm_blocks, self.num_host_blocks))
        logger.info(
            "%s on %s in %s, %d KV blocks of %d tokens",
            self.build,
            self.device_name,
            self.dtype_name,
            self.num_blocks,
            self.block_size,
        )

    # ---- what it is ----

    @property
    def num_blocks(self) -> int:
        return self._num_vllm_blocks - NULL_BLOCKS

    @property
    def block_size(self) -> int:
        size: int = self._vllm_config.cache_config.block_size
        return size

    @property
    def device(self) -> str:
        """Device type, for example ``cpu``."""
        return str(self._vllm_config.device_config.device_type)

    @property
    def device_name(self) -> str:
        """Product name, and the number of devices if there are several."""
        import torch

        count = self._vllm_config.parallel_config.world_size
        name = device_name(torch.device(self.device))
        return name if count == 1 else f"{count} x {name}"

    @property
    def dtype_name(self) -> str:
        return str(self._vllm_config.model_config.dtype).removeprefix("torch.")

    @property
    def num_threads(self) -> int:
        """Compute threads; 0 on a GPU."""
        import torch

        return torch.get_num_threads() if self.device == "cpu" else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of all layers over all ranks."""
        cache = self._engine.scheduler.kv_cache_config
        # Layers of another shape follow the first ones in the same memory; each states its whole size.
        rank_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors if tensor.offset == 0)
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        return int(rank_bytes) * int(ranks) // (int(cache.num_blocks) * self.block_size)

    @property
    def build(self) -> str:
        """vLLM's version, its runner, and the operator's arguments."""
        import vllm

        words = ["vllm", vllm.__version__, "V2" if self._is_v2 else "V1", describe(self._arguments)]
        return " ".join(word for word in words if word)

    def touch_blocks(self, count: int) -> None:
        """Writes zeros. On a CPU untouched memory reads faster than real memory."""
        self._zero(list(range(count)))

    # ---- steps ----

    def submit(self, plan: StepPlan) -> "VllmHandle":
        """Runs the step on a CPU, starts it on a GPU.

        If a grammar needs a token that an earlier step still samples, it waits for that step after launching the
        forward pass.
        """
        start_s = self._clock.now()
        self._refuse_late_answers()
        self.translator.heed(plan)
        self.grammars.heed(plan)
        if plan.zero_blocks:
            self._zero(plan.zero_blocks)
        copied = [self._copy(plan)] if plan.saves or plan.loads else []
        # vLLM's buffers hold no more, and nothing there would report it
        if plan.shape.num_tokens > self._max_step_tokens:
            raise ValueError(
                f"{plan.shape.num_tokens} tokens in one step, but vLLM was started for at most {self._max_step_tokens}"
            )
        result = StepResult.of(plan)
        if self.translator.invalid:
            result.errors |= dict.fromkeys(self.translator.invalid.intersection(plan.request_ids), INVALID_TOKEN)
        if len(result.errors) == len(plan):
            for answer in [*copied, *self._finish_saves(plan)]:
                answer.result()
            return VllmHandle(self, plan, result)
        step = self._num_steps + 1
        try:
            filling = self.grammars.begin(plan, result.errors)
            order = self.translator.order(plan)
            translated_s = self._clock.now()
            executed = self._workers.execute_model(order, non_block=True)
            self._num_steps = step
            placed = self._place_generators(plan)
            chunks = self._chunks_to_score(plan, result)
            if chunks:
                placed.append(self._ask(score_prompts, [(chunk.request_id, chunk.top) for chunk in chunks]))
            mask = None if filling is None else filling.result()
            allowed = None if mask is None else GrammarOutput(mask.request_ids, mask.bits)
            sampled = self._workers.sample_tokens(allowed, non_block=True)
            going_on = [(chunk.request_id, chunk.start, chunk.end) for chunk in chunks if not chunk.is_last]
            taken = self._ask(take_scores, going_on) if going_on else None
            saved = self._finish_saves(plan)
        except Exception:
            self.recover(plan, step)
            raise
        result.prepare_s = translated_s - start_s
        result.model_s = self._clock.now() - translated_s
        before = [*copied, executed, *placed]
        answers = Answers(step, before, sampled, chunks, taken, saved, {} if mask is None else mask.errors)
        handle = VllmHandle(self, plan, result, answers)
        self.grammars.submitted(plan, handle)
        return handle

    def finish(self, plan: StepPlan, result: StepResult, answers: "Answers") -> None:
        """Waits for a step and collects its results."""
        start_s = self._clock.now()
        self._refuse_late_answers()
        try:
            for answer in answers.before:
                answer.result()
            output = answers.sampled.result()
            taken = {} if answers.taken is None else answers.taken.result()[0]
            for answer in answers.saved:
                answer.result()
        except Exception as error:
            self._note(error)
            for answer in [answers.taken or answers.sampled, *answers.saved]:  # their answers are on the way too
                self._try(answer.result)
            self.recover(plan, answers.step)
            raise
        done_s = self._clock.now()
        result.model_s += done_s - start_s
        collect(plan, self.translator.told, output, result, answers.failed)
        if answers.chunks:
            collect_scores(answers.chunks, taken, output, result)
        result.sample_s = self._clock.now() - done_s

    def recover(self, plan: StepPlan, step: int) -> None:
        """Brings the runner to a state in which it can accept the next step, after a step with this number raised."""
        if self._silence is None:
            timeout_s = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
            self._try(lambda: self._workers.collective_rpc(recover, timeout=timeout_s, args=(step,)))
        self.translator.invalidate(plan)

    def close(self) -> None:
        """Ends the workers. The executor cannot be used afterwards."""
        self.translator.told.clear()
        self.grammars.close()
        self._engine.shutdown()

    def _refuse_late_answers(self) -> None:
        if self._silence is not None:
            raise RuntimeError("vLLM's workers did not answer in time; no more steps are sent") from self._silence

    def _try(self, ask: Callable[[], Any]) -> None:
        """Calls ``ask`` and ignores its errors, except a time-out, which is recorded."""
        try:
            ask()
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        if isinstance(error, TimeoutError):
            self._silence = error

    def _zero(self, block_ids: list[int]) -> None:
        ids = [block + NULL_BLOCKS for block in block_ids]
        self._workers.collective_rpc(zero_blocks, args=(self._num_vllm_blocks, ids))

    def _copy(self, plan: StepPlan) -> Any:
        """Copies blocks between KV cache and host memory. Saves may go on after the answer."""
        saves = [(block + NULL_BLOCKS, slot) for block, slot in plan.saves]
        loads = [(slot, block + NULL_BLOCKS) for slot, block in plan.loads]
        return self._workers.collective_rpc(copy_blocks, args=(self._num_vllm_blocks, saves, loads), non_block=True)

    def _finish_saves(self, plan: StepPlan) -> list[Any]:
        """Asks every worker to answer once the plan's saves are done; nothing if it has none."""
        return [self._workers.collective_rpc(finish_saves, non_block=True)] if plan.saves else []

    def _to_params(self, new: NewRequest) -> Any:
        params, seed = new.params, None
        if is_random(params) and (self._is_v2 or params.seed is not None):
            seed = draw_seed(params.seed if params.seed is not None else new.request_id)
        return to_vllm(params, self._eos_token_ids, seed)

    def _place_generators(self, plan: StepPlan) -> list[Any]:
        seeded, told = self.translator.seeded, self.translator.told
        if self._is_v2 or not seeded:
            return []  # V2's draws already depend on seed and position
        draws: list[tuple[str, int | None]] = []
        columns = zip(plan.request_ids, plan.sample.tolist(), plan.output_position.tolist(), strict=True)
        for request_id, samples, position in columns:
            if request_id in seeded:
                seed = told[request_id].new.params.seed
                assert seed is not None
                draws.append((request_id, draw_seed(seed, position) if samples else None))
        if not draws:
            return []
        return [self._ask(place_generators, draws)]

    def _chunks_to_score(self, plan: StepPlan, result: StepResult) -> list[ScoredChunk]:
        chunks = chunks_to_score(plan, self.translator.told, self.translator.scored)
        return [chunk for chunk in chunks if chunk.request_id not in result.errors]

    def _ask(self, what: Callable[..., Any], parts: list[Any]) -> Any:
        """Asks every worker, after its earlier questions."""
        return self._workers.collective_rpc(what, args=(parts,), non_block=True)


@dataclass(slots=True)
class Answers:
    """The pending answers of vLLM's workers to a step, in this order."""

    step: int
    """Step number."""
    before: list[Any]
    sampled: Any
    chunks: list[ScoredChunk]
    taken: Any
    """Scores of chunks that are not their prompts' last; None if there are none."""
    saved: list[Any]
    """The end of the step's copies to host memory."""
    failed: Mapping[str, str]
    """Requests that have already failed."""


class VllmHandle:
    """A submitted step. It may be waited for twice, by the engine and by a mask of the next step.

    Args:
        answers: None if nothing was sent.
    """

    def __init__(
        self, executor: VllmExecutor, plan: StepPlan, result: StepResult, answers: Answers | None = None
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._result = result
        self._answers = answers
        self._error: Exception | None = None

    def wait(self) -> StepResult:
        answers, self._answers = self._answers, None
        if answers is not None:
            try:
                self._executor.finish(self._plan, self._result, answers)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result
