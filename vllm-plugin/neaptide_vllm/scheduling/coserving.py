"""vLLM's scheduler with Neaptide's judgement.

vLLM keeps its loops, blocks, prefix cache, structured output, LoRA, speculation and connectors. We decide the order of
the requests, how many tokens each gets, and which offline requests are preempted for chats that wait.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.scheduler.budget import Reads
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.recipes import build_headroom
from neaptide_vllm.scheduling.cost import LearnedCostModel
from neaptide_vllm.scheduling.online import Online, is_offline, target_s
from neaptide_vllm.scheduling.planner import Planner
from neaptide_vllm.scheduling.step import COMPUTED, Roster, Step, column
from neaptide_vllm.scheduling.targets import DefaultTargets
from neaptide_vllm.scheduling.waiting import WaitingQueue
from neaptide_vllm.series import CARRIER, PLUGIN, Given
from neaptide_vllm.settings import Settings

logger = init_logger("vllm.neaptide")
RUNNING = RequestStatus.RUNNING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as Base
else:
    Base = object


class Sent(NamedTuple):
    """A step whose outcome is not in."""

    output: SchedulerOutput
    shape: BatchShape
    sent_s: float


class CoServing(Base):
    """Mixin over either of vLLM's schedulers."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    wall_clock: Callable[[], float] = staticmethod(time.time)
    """The clock of ``Request.arrival_time``, which the API process sets."""
    fits_in_background = True

    def __init__(self, vllm_config: VllmConfig, **parts: Any) -> None:
        super().__init__(vllm_config=vllm_config, **parts)
        self.policy = SchedulingPolicy.PRIORITY  # vLLM preempts the last priority first, and its youngest request
        self.settings = settings = Settings.of(vllm_config.additional_config)
        self.online: dict[str, Online] = {}
        """Online requests by id, until they end."""
        self.waiting: WaitingQueue = WaitingQueue(self.online)
        self.kv_holding_waiting: WaitingQueue = WaitingQueue(self.online)
        pool = ThreadPoolExecutor(1, "neaptide-fit") if self.fits_in_background else None
        self.cost_model = LearnedCostModel(pool, settings.profiled())
        self.targets = DefaultTargets(settings, self.cost_model)
        config = SchedulerConfig(
            max_num_seqs=self.max_num_active_reqs,
            max_num_batched_tokens=self.max_num_scheduled_tokens,
            max_model_len=self.max_model_len,
            ttft_slo_s=self.targets.ttft_slo_s,
            tpot_slo_s=self.targets.tpot_slo_s,
            late_price_s=settings.late_price_s,
            offline_max_kv_ratio=settings.offline_max_kv_ratio,
            delivery_latency_s=settings.delivery_ms / 1e3,
            overlap_depth=int(isinstance(self, AsyncScheduler)),
        )
        self.planner = Planner(config, self.cost_model, self._cached_tokens)
        self._num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        self._block_headroom = build_headroom(settings.headroom, self._num_blocks)
        self._slot_headroom = build_headroom(settings.headroom, self.max_num_active_reqs)
        self._own_watermark = self.kv_cache_manager.watermark_blocks
        self._offline_watermark = 0
        self._slots_left = 0
        """Offline requests that may be admitted in this step."""
        self._roster = Roster(self.online, isinstance(self, AsyncScheduler), vllm_config.speculative_config is not None)
        self._pauses_decodes = vllm_config.parallel_config.pipeline_parallel_size > 1
        self._step: Step | None = None
        """The step that is planned; None once planning has failed."""
        self.is_planning = True
        """False once planning has failed: then vLLM decides alone, by priority."""
        self.given = Given()
        self._sends_series = envs.VLLM_PLUGINS is None or PLUGIN in envs.VLLM_PLUGINS
        """Whether the API process has the plug-in that takes our series out of what it gets."""
        self._logged_s = -math.inf
        self._sent: deque[Sent] = deque()
        self._ended_s = 0.0
        """When the last outcome came in."""
        self._without_token: dict[str, Online] = {}
        """Scheduled online requests whose first token is not in."""

    # ---- requests ----

    def add_request(self, request: Request) -> None:
        if (online := self.online.get(request.request_id)) is not None:
            online.begin_turn(self.clock())
        elif not is_offline(request) and request.request_id not in self.requests:
            self._observe_arrival(request)
        super().add_request(request)

    def _observe_arrival(self, request: Request) -> None:
        waited_s = max(self.wall_clock() - request.arrival_time, 0.0)
        params = request.sampling_params
        arguments = params.extra_args if params is not None else None
        config = self.planner.config
        online = self.online[request.request_id] = Online(
            request,
            self.clock() - waited_s,
            target_s(arguments, "ttft_ms", config.ttft_slo_s),
            target_s(arguments, "tpot_ms", config.tpot_slo_s),
        )
        self.planner.traffic.observe_arrival(online)
        self._block_headroom.observe_arrival(online.arrival_s)
        self._slot_headroom.observe_arrival(online.arrival_s)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._roster.forget(request)
        online = self.online.pop(request.request_id, None)
        if online is not None:
            self._note_first_token(online, self.clock())
            self._without_token.pop(request.request_id, None)
            self._count_answer(online)
            self.planner.traffic.observe_end(online)
        else:
            self.planner.forget(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def _cached_tokens(self, online: Online) -> int:
        """Tokens of a waiting prompt in the prefix cache."""
        num_tokens: int = self.kv_cache_manager.get_computed_blocks(online.request)[1]
        return num_tokens

    # ---- a step ----

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        began_s, measured_s = self.clock(), time.perf_counter()
        try:
            self._step = self._plan(began_s) if self.is_planning else None
        except Exception:
            self._give_up()
        if self._step is None:
            self.waiting.begin((online.request for online in self.waiting.online), True)
        self.kv_holding_waiting.begin((online.request for online in self.kv_holding_waiting.online), True)
        planned_s = time.perf_counter() - measured_s
        output = super().schedule(throttle_prefills)
        measured_s = time.perf_counter()
        self.kv_cache_manager.watermark_blocks = self._own_watermark
        if self._step is not None and output.total_num_scheduled_tokens:
            self._step.mark("offline")
            self._sent.append(Sent(output, self._shape_of(self._step, output), began_s))
            self._count(self._step)
            self.given.add("planning_s", planned_s + time.perf_counter() - measured_s)
        self._log(began_s)
        return output

    def _plan(self, began_s: float) -> Step:
        """Plans a step, makes room for it and opens the queues."""
        self._update_targets()
        self._roster.follow(self.running)
        step = self._begun(began_s)
        ready: list[Online] = []
        blocked: list[Request] = []
        for online in self.waiting.online:
            if self._is_blocked_waiting_status(online.request.status):
                blocked.append(online.request)
            else:
                ready.append(online)
        if ready and not self._slots_free() and not any(map(self._request_blocks_can_be_freed, step.offline)):
            ready = []  # They would take the step's time from those that run, and none could begin.
        has_offline = bool(step.offline or self.waiting.offline)
        named = [online.request for online in self.planner.plan(step, ready, has_offline)]
        self._keep_for_online(step, began_s)
        if named and not self._make_way(step, named, began_s):
            step = self._begun(began_s)
            self.planner.plan(step, (), has_offline)
        # vLLM looks whether those that were blocked are ready.
        self.waiting.begin(named + blocked, step.offline_limit_s > 0.0 and self._slots_left > 0)
        return step

    def _begun(self, began_s: float) -> Step:
        """An empty step."""
        return Step(
            self._start_s(began_s),
            self._roster,
            self.cost_model,
            self.max_num_scheduled_tokens,
            self.block_size,
            self.current_step + 1 if self._pauses_decodes else None,
        )

    def _give_up(self) -> None:
        """Planning failed: the server goes on without."""
        logger.exception("neaptide: planning failed; from now on vLLM decides alone, by priority")
        self.is_planning, self._step = False, None
        self._sent.clear()

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Tokens that a request computes. vLLM asks this last before it allocates blocks, for running and waiting
        requests alike."""
        step, is_running = self._step, request.status is RUNNING
        if step is None:
            granted = num_new_tokens
        elif is_running:
            granted = step.grants.get(request.request_id, num_new_tokens)
            if granted > num_new_tokens:
                granted = num_new_tokens
        else:
            granted = min(self._granted(step, request, num_computed_tokens, num_new_tokens), num_new_tokens)
        if self.num_prefill_lookahead:
            granted = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, granted))
        if granted <= 0 and not is_running:
            self.waiting.close()
        return granted

    def _granted(self, step: Step, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Tokens of a waiting request."""
        request_id = request.request_id
        online = self.online.get(request_id)
        if online is None:
            return self._admit_offline(step, request, num_computed_tokens, num_new_tokens)
        self.kv_cache_manager.watermark_blocks = self._own_watermark
        granted = step.grants.get(request_id)
        if granted is None:  # it was not ready when the step was planned
            limit_s = max(step.offline_limit_s, self.planner.config.tpot_slo_s)
            granted = step.budget.largest_chunk(num_new_tokens, num_computed_tokens, limit_s)
            if not granted and not step.num_parts:
                granted = num_new_tokens
            if granted:
                step.add(request, granted, num_computed_tokens)
        elif num_computed_tokens != online.cached_tokens:
            step.is_as_planned = False
        if granted:
            self.planner.traffic.observe_admission(online, request.num_tokens - num_computed_tokens)
            self._without_token[request_id] = online
        return granted

    def _admit_offline(self, step: Step, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        self.kv_cache_manager.watermark_blocks = self._offline_watermark
        if request.request_id in step.barred:
            return 0
        granted = step.offline_chunk(num_new_tokens, num_computed_tokens)
        if granted:
            step.add(request, granted, num_computed_tokens)
            self._slots_left -= 1
            if self._slots_left <= 0:
                self.waiting.close_offline()
        return granted

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        now_s = self.clock()
        try:
            self._learn(scheduler_output, now_s)
        except Exception:
            self._give_up()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for online in list(self._without_token.values()):
            self._note_first_token(online, now_s)
        return outputs

    def _note_first_token(self, online: Online, now_s: float) -> None:
        """Notes the time of a first token, if there is one and it was not noted."""
        request_id = online.request.request_id
        if request_id in self._without_token and online.request.num_output_tokens:
            del self._without_token[request_id]
            online.first_token_s = now_s
            is_late = now_s > online.arrival_s + online.ttft_slo_s
            self.given.add("first_late" if is_late else "first_in_time")

    def _learn(self, scheduler_output: SchedulerOutput, now_s: float) -> None:
        while self._sent:
            output, shape, sent_s = self._sent.popleft()
            if output is scheduler_output:
                if shape.num_tokens:
                    self.cost_model.observe(shape, now_s - max(sent_s, self._ended_s))
                break
        self._ended_s = now_s

    def _start_s(self, now_s: float) -> float:
        """When the step that is planned will begin: after those in flight."""
        for _, shape, sent_s in self._sent:
            if shape.num_tokens:
                now_s = max(now_s, max(sent_s, self._ended_s) + self.cost_model.predict(shape).seconds)
        return now_s

    def _shape_of(self, step: Step, output: SchedulerOutput) -> BatchShape:
        """The step's shape, whose tokens are counted by class."""
        shape, num_online = step.planned_shape(output) or self._read_shape(output)
        self.given.add("online_tokens", num_online)
        self.given.add("offline_tokens", output.total_num_scheduled_tokens - num_online)
        return shape

    def _read_shape(self, output: SchedulerOutput) -> tuple[BatchShape, int]:
        """Shape and online tokens of a step, request by request. A decode with drafts counts as a decode for each
        token."""
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        num_tokens = np.fromiter(scheduled.values(), np.int64, len(scheduled))
        contexts = column(COMPUTED, list(map(self.requests.__getitem__, scheduled))) - num_tokens
        is_decode = (num_tokens == 1) & (contexts > 0)
        if drafts:
            is_decode |= np.fromiter(map(drafts.__contains__, scheduled), np.bool_, len(scheduled))
        shape = BatchShape()
        for chunk_tokens, context in zip(num_tokens[~is_decode].tolist(), contexts[~is_decode].tolist(), strict=True):
            shape.add(chunk_tokens, context)
        if is_decode.any():
            shape.add_decodes(int(num_tokens[is_decode].sum()), *Reads.among(contexts[is_decode] + 1))
        is_online = np.fromiter(map(self.online.__contains__, scheduled), np.bool_, len(scheduled))
        return shape, int(num_tokens[is_online].sum())

    def _update_targets(self) -> None:
        if self.targets.update(self.planner.traffic):
            self.planner.set_targets(self.targets.ttft_slo_s, self.targets.tpot_slo_s)

    # ---- what was given to whom ----

    def _count(self, step: Step) -> None:
        self.given.add("steps")
        for work, seconds in step.seconds_for.items():
            self.given.add(f"{work}_s", max(seconds, 0.0))

    def _count_answer(self, online: Online) -> None:
        """Counts an ended answer of more than one token by its mean time between tokens."""
        num_gaps = online.request.num_output_tokens - 1
        if num_gaps > 0 and online.first_token_s < math.inf:
            is_late = self.clock() - online.first_token_s > num_gaps * online.tpot_slo_s
            self.given.add("answers_late" if is_late else "answers_in_time")

    def _gauges(self) -> dict[str, float]:
        config = self.planner.config
        return {
            "ttft_s": config.ttft_slo_s,
            "tpot_s": config.tpot_slo_s,
            "waiting_online": len(self.waiting.online),
            "waiting_offline": len(self.waiting.offline),
            "cost_error": self.cost_model.mape,
            "active": float(self.is_planning),
        }

    def _log(self, now_s: float) -> None:
        """Writes a line about the last interval, if it is over and there was work."""
        seconds = now_s - self._logged_s
        if seconds < self.settings.log_interval_s:
            return
        if self.given.recent and seconds < math.inf:
            logger.info("%s", self.given.line(seconds, self._gauges()))
        self._logged_s = now_s

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if self._sends_series and hasattr(stats, CARRIER):
            stats.num_kv_fetch_reqs_by_stage |= self.given.take(self._gauges())
        return stats

    # ---- blocks and slots ----

    def _blocks_of(self, num_tokens: int) -> int:
        """Most blocks that so many tokens of a request take."""
        num_blocks: int = -(-num_tokens // self.block_size) * len(self.kv_cache_config.kv_cache_groups)
        return num_blocks

    def _keep_for_online(self, step: Step, now_s: float) -> None:
        """Sets how many blocks and slots admitted offline requests leave for chats."""
        online_blocks = step.online_blocks * len(self.kv_cache_config.kv_cache_groups)
        self._block_headroom.observe(now_s, online_blocks)
        self._slot_headroom.observe(now_s, step.num_online + len(self.waiting.online))
        ratio, num_offline = self.settings.offline_max_kv_ratio, len(step.offline)
        kept_blocks = max(self._block_headroom.headroom_blocks(now_s), int((1.0 - ratio) * self._num_blocks))
        self._offline_watermark = max(kept_blocks - online_blocks, 0)
        kept_slots = max(self._slot_headroom.headroom_blocks(now_s), step.num_online)
        self._slots_left = max(self.max_num_active_reqs - kept_slots, 1) - num_offline

    def _slots_free(self) -> int:
        return int(self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input)

    def _victims(self, step: Step) -> list[Request]:
        """Running offline requests that may be preempted, the last one first to go."""
        return sorted(filter(self._request_blocks_can_be_freed, step.offline))

    def _make_way(self, step: Step, named: Iterable[Request], now_s: float) -> bool:
        """Preempts offline requests, the youngest first, for chats that wait for blocks or slots: no more than it
        takes, and none if all would not do. Returns whether any chat finds room."""
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() - self._own_watermark
        slots, num_fitting = self._slots_free(), 0
        victims: list[Request] | None = None
        for request in named:
            needed = self._blocks_of(request.num_tokens)
            if free >= needed and slots >= 1:
                free, slots, num_fitting = free - needed, slots - 1, num_fitting + 1
                continue
            if victims is None:
                victims = self._victims(step)
            chosen: list[Request] = []
            gained = 0
            while victims and (free + gained < needed or slots + len(chosen) < 1):
                chosen.append(victims.pop())
                gained += self._blocks_of(chosen[-1].num_computed_tokens)
            if free + gained < needed or slots + len(chosen) < 1:
                break
            for victim in chosen:
                self._preempt_for_chat(step, victim, now_s)
            free, slots, num_fitting = free + gained - needed, slots + len(chosen) - 1, num_fitting + 1
        return num_fitting > 0

    def _preempt_for_chat(self, step: Step, victim: Request, now_s: float) -> None:
        self.running.remove(victim)
        self._roster.forget(victim)
        self._preempt_request(victim, now_s, drop_stale_output=self.requires_kv_delivery)
        self.given.add("preempted")
        step.barred.add(victim.request_id)
        step.grants.pop(victim.request_id, None)


class SyncCoServing(CoServing, Scheduler):
    """For steps that end before the next is planned, as on CPUs."""


class AsyncCoServing(CoServing, AsyncScheduler):
    """For steps that are planned while another runs."""
