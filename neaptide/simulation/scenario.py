"""The input of a simulation: a device, a load, a policy and its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.engine.scheduler.policies import find_policy
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.estimator.recipes import DEFAULT_HEADROOM, Recipe, roofline_recipe
from neaptide.executors.simulated.trace_executor import Layers
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.measures import Window
from neaptide.simulation.offline_feed import NO_DEADLINE_S
from neaptide.simulation.result import SimSettings


@dataclass(slots=True, frozen=True)
class GiveUp:
    """How the simulated executor aborts a step when an online request arrives."""

    layers: Layers
    """The layers between which a step can be aborted, and the time that this takes."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """A simulation's input. Times are in seconds."""

    profile: DeviceProfile
    online: Sequence[TraceRequest] = ()
    offline: Sequence[OfflineSet] = ()
    policy: str = "neaptide"
    left_out: tuple[str, ...] = ()
    """Disabled features of the policy, see ``neaptide.engine.scheduler.parts``."""
    plan: str | None = None
    """Order of the offline pool (``simulation.pools.inline_planner``); None leaves it to the policy."""
    planner_is_told: bool = True
    """Whether the planner knows the lengths of the rows in BlendServe's warm-up, and requested exact lengths.

    Otherwise it has a server's knowledge (``simulation.pools.served_planner``).
    """
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.05
    overlap_kappa: float = 1.0
    block_size: int = 16
    seed: int = 0
    keep_order: bool = False
    """Do not shuffle several offline sets together; each set has its own order."""
    refill: bool = True
    """Refill the pool with new contents. Otherwise it may run out of work."""
    offline_deadline_s: float = NO_DEADLINE_S
    """Deadline of offline jobs without their own, counted from their submission."""
    share_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the offline sets' tenants; 1 by default."""
    window_s: Window | None = None
    """The measured window; the run continues at least until its end. None uses the time from the first to the last
    online arrival or, without online work, the run without both its ends."""
    drain_s: float = 600.0
    """Longest time after the last arrival to wait for unfinished online requests."""
    step_noise: float = 0.0
    """Standard deviation of the log of a step's time relative to its mean."""
    headroom: str = DEFAULT_HEADROOM
    """See ``neaptide.estimator.recipes``."""
    late_price_s: float = SchedulerConfig().late_price_s
    """Seconds of offline work that one online request in time is worth."""
    offline_max_kv_ratio: float = SchedulerConfig().offline_max_kv_ratio
    """Largest fraction of the KV blocks that offline work may hold."""
    planning_scale: float = 1.0
    """Factor on the profile's planning time; 0 plans in no time."""
    overlap_depth: int = 0
    """Steps in flight while the next one is planned, 0 or 1."""
    host_cache_bytes: int = 0
    """Host memory for evicted KV blocks, or for what a policy's own cache keeps there."""
    bros_initial_batch_size: int = SchedulerConfig().bros_initial_batch_size
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131_072
    """Most tokens of a request, prompt and output, if the KV cache is large enough; equal for all models."""
    max_output_tokens: int | None = None
    """``max_tokens`` of every request, which is all that a policy knows of lengths; None uses the rest of the
    context."""
    truth: CostModel | None = None
    """Actual step times; None uses the profile's model."""
    with_bounds: bool = True
    """Compute the saving of an unlimited cache and the upper bounds; this takes seconds if many rows wait."""
    give_up: GiveUp | None = None
    """Abort offline-only steps between layers when an online request arrives; None runs all steps to their end."""
    cost_model: Recipe | None = None
    """The scheduler's cost model; None uses the profile's model, corrected online."""

    @property
    def order(self) -> str | None:
        """The order of the offline plan; None if there is no plan."""
        return self.plan or find_policy(self.policy).planned_order

    @property
    def device(self) -> DeviceProfile:
        """The profile with its memory in blocks of this engine's size."""
        return self.profile.in_blocks_of(self.block_size)

    @property
    def num_blocks(self) -> int:
        return self.device.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.host_cache_bytes // (self.block_size * self.profile.kv_bytes_per_token)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a request, prompt and output, in this KV cache."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def planned_as_served(self) -> "Scenario":
        """The same scenario with a GPU server's offline plan, which knows an answer's length only after its end."""
        return replace(self, plan=DUAL_SCAN, planner_is_told=False)

    def output_limit(self, request: TraceRequest) -> int:
        """The request's ``max_tokens``; 0 or less if the prompt leaves no room."""
        room = self.max_tokens - request.input_tokens
        return room if self.max_output_tokens is None else min(room, self.max_output_tokens)

    def planning_s(self, num_running: int) -> float:
        return self.planning_scale * self.profile.planning.seconds(num_running)

    def engine_config(self) -> EngineConfig:
        scheduler = SchedulerConfig(
            policy=self.policy,
            left_out=self.left_out,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_tokens,
            ttft_slo_s=self.ttft_slo_s,
            tpot_slo_s=self.tpot_slo_s,
            overlap_depth=self.overlap_depth,
            late_price_s=self.late_price_s,
            offline_max_kv_ratio=self.offline_max_kv_ratio,
            share_weights=dict(self.share_weights),
            bros_initial_batch_size=self.bros_initial_batch_size,
            abortable_steps=self.give_up is not None,
        )
        cache = CacheConfig(
            block_size=self.block_size,
            num_host_blocks=self.num_host_blocks,
            slot_copies=self.num_host_blocks > 0,
            shared_reads=self.profile.shared_reads,
        )
        return EngineConfig(cache=cache, scheduler=scheduler)

    def recipe(self) -> Recipe:
        """The recipe for the step log's header."""
        cost_model = self.cost_model or roofline_recipe(self.device, self.overlap_kappa)
        return {"cost_model": cost_model, "headroom": self.headroom, "profile": self.profile.name, "seed": self.seed}

    def settings(self) -> SimSettings:
        """The settings for the result."""
        return SimSettings(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_tokens,
            max_tokens=self.max_output_tokens,
            ttft_slo_s=self.ttft_slo_s,
            tpot_slo_s=self.tpot_slo_s,
            step_noise=self.step_noise,
            headroom=self.headroom,
            block_size=self.block_size,
            overlap_kappa=self.overlap_kappa,
            planning_scale=self.planning_scale,
            overlap_depth=self.overlap_depth,
            num_host_blocks=self.num_host_blocks,
            late_price_s=self.late_price_s,
            left_out=self.left_out,
            plan=self.order,
        )
