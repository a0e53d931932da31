"""The scheduling policies by name."""

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.baselines.batchllm import BatchLlm
from neaptide.engine.scheduler.baselines.blendserve import BlendServe
from neaptide.engine.scheduler.baselines.bros import BrosScheduler
from neaptide.engine.scheduler.baselines.echo_bs_e import EchoBaseWithEstimator
from neaptide.engine.scheduler.baselines.echo_selector import Echo, EchoWithSelector
from neaptide.engine.scheduler.baselines.orders import DepthFirstFcfs, ShuffledFcfs
from neaptide.engine.scheduler.baselines.round_robin import RoundRobinScheduler
from neaptide.engine.scheduler.baselines.sglang import Lpm
from neaptide.engine.scheduler.baselines.vllm_v0 import VllmV0Fcfs, VllmV0Priority
from neaptide.engine.scheduler.baselines.vllm_v1 import VllmV1Fcfs, VllmV1Priority
from neaptide.engine.scheduler.packing import NeaptideScheduler
from neaptide.engine.scheduler.parts import without

POLICIES: dict[str, type[Scheduler]] = {
    "neaptide": NeaptideScheduler,
    "fcfs": VllmV1Fcfs,
    "priority": VllmV1Priority,
    "fcfs-v0": VllmV0Fcfs,
    "priority-v0": VllmV0Priority,
    "lpm": Lpm,
    "round-robin": RoundRobinScheduler,
    "bros": BrosScheduler,
    "bs+e": EchoBaseWithEstimator,
    "bs+e+s": EchoWithSelector,
    "echo": Echo,
    "dfs": DepthFirstFcfs,
    "balance": ShuffledFcfs,
    "batchllm": BatchLlm,
    "blendserve": BlendServe,
}


def policy_of(config: SchedulerConfig) -> type[Scheduler]:
    """The policy that the configuration names, without its disabled parts.

    Raises:
        ValueError: the policy has no such part.
    """
    return without(POLICIES[config.policy], config.left_out)
