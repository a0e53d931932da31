"""What a simulation is given: a device, a load, a policy and its settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.offline.planning.pooled import TWO_ENDS
from neaptide.engine.scheduler.policies import find_policy
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.estimator.recipes import DEFAULT_HEADROOM, Recipe, roofline_recipe
from neaptide.executors.simulated.trace_executor import Layers
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.measures import Window
from neaptide.simulation.offline_feed import NO_DEADLINE_S
from neaptide.simulation.result import Settings


@dataclass(slots=True, frozen=True)
class GiveUp:
    """How the simulated executor gives up a step when an online request comes."""

    layers: Layers
    """Between which it can, and what that takes."""
    idle_factor: float = 1.0
    """On the time that a step without online work may take, for the next request need not wait for its end."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """What is simulated. Times in seconds."""

    profile: DeviceProfile
    online: Sequence[TraceRequest] = ()
    offline: Sequence[OfflineSet] = ()
    policy: str = "neaptide"
    left_out: tuple[str, ...] = ()
    """Parts of the policy, see ``neaptide.engine.scheduler.parts``."""
    plan: str | None = None
    """The order that the offline pool follows (``simulation.pools.inline_planner``); None leaves it to the policy."""
    planner_is_told: bool = True
    """The lengths of the answers that BlendServe's warm-up would run first, and of those that are asked for. Else it
    knows and does what a server's does (``simulation.pools.served_planner``)."""
    ttft_slo_s: float = 1.0
    tpot_slo_s: float = 0.05
    overlap_kappa: float = 1.0
    block_size: int = 16
    seed: int = 0
    keep_order: bool = False
    """Of the offline sets, when there are several; each comes in an order of its own."""
    refill: bool = True
    """The pool goes on with fresh contents. Without it the run may go dry."""
    offline_deadline_s: float = NO_DEADLINE_S
    """Of every offline job without one of its own, counted from its submission."""
    share_weights: Mapping[str, float] = field(default_factory=dict)
    """Of the offline sets' shares; 1 unless given."""
    window_s: Window | None = None
    """What is measured; the run goes on until it is over. None takes the time from the first to the last online
    arrival, or without online work all but both ends of the run."""
    drain_s: float = 600.0
    """So long after the last arrival the run goes on for online requests that are not finished."""
    step_noise: float = 0.0
    """Standard deviation of the logarithm of a step's time over what it takes on average."""
    headroom: str = DEFAULT_HEADROOM
    """See ``neaptide.estimator.recipes``."""
    offline_max_kv_ratio: float = SchedulerConfig().offline_max_kv_ratio
    """Of the KV blocks, what offline work may hold at most."""
    planning_scale: float = 1.0
    """How many times the profile's planning time is charged; 0 plans in no time."""
    overlap_depth: int = 0
    """Steps in flight while the next one is planned, 0 or 1."""
    host_cache_bytes: int = 0
    """Host memory for KV blocks that leave the cache; with it ``bros`` has its bidirectional blocks."""
    bros_initial_batch_size: int = SchedulerConfig().bros_initial_batch_size
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131_072
    """Prompt and output of one request at most, if the KV cache has room for them; the same for every model."""
    max_output_tokens: int | None = None
    """``max_tokens`` of every request, all that a policy knows of lengths; None asks for the rest of the context."""
    truth: CostModel | None = None
    """How long steps really take; None takes the profile's model."""
    with_bounds: bool = True
    """The result says what an endless cache would save, and what no policy could pass; seconds of work where many rows
    wait."""
    give_up: GiveUp | None = None
    """Steps of offline work alone are given up between layers when an online request comes; None runs all to their
    end."""
    cost_model: Recipe | None = None
    """What the scheduler believes; None takes the profile's model, corrected online."""

    @property
    def order(self) -> str | None:
        """Of a plan; None where none is made."""
        return self.plan or find_policy(self.policy).planned_order

    @property
    def device(self) -> DeviceProfile:
        """With its memory in blocks of this engine's size."""
        return self.profile.in_blocks_of(self.block_size)

    @property
    def num_blocks(self) -> int:
        return self.device.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.host_cache_bytes // (self.block_size * self.profile.kv_bytes_per_token)

    @property
    def max_tokens(self) -> int:
        """Prompt and output of one request at most, in this KV cache."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def planned_as_served(self) -> "Scenario":
        """The same along the plan that a server makes of its pool on a GPU, told of no answer before it has ended."""
        return replace(self, plan=TWO_ENDS, planner_is_told=False)

    def output_limit(self, request: TraceRequest) -> int:
        """Its ``max_tokens``; not positive if the prompt leaves no room."""
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
            offline_max_kv_ratio=self.offline_max_kv_ratio,
            share_weights=dict(self.share_weights),
            bros_initial_batch_size=self.bros_initial_batch_size,
            gives_up_steps=self.give_up is not None,
        )
        cache = CacheConfig(
            block_size=self.block_size, num_host_blocks=self.num_host_blocks, two_tenant_blocks=self.num_host_blocks > 0
        )
        return EngineConfig(cache=cache, scheduler=scheduler)

    def recipe(self) -> Recipe:
        """For the header of the step log."""
        cost_model = self.cost_model or roofline_recipe(self.device, self.overlap_kappa)
        return {"cost_model": cost_model, "headroom": self.headroom, "profile": self.profile.name, "seed": self.seed}

    def settings(self) -> Settings:
        """For the result."""
        return Settings(
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
            left_out=self.left_out,
            plan=self.order,
        )
