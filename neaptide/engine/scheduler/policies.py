"""Every scheduling policy by its name."""

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.scheduler.base import Scheduler
from neaptide_lab.policies.batchllm import BatchLlm
from neaptide_lab.policies.blendserve import BlendServe
from neaptide_lab.policies.bros import BrosScheduler
from neaptide_lab.policies.echo_bs_e import EchoBaseWithEstimator
from neaptide_lab.policies.echo_selector import Echo, EchoWithSelector
from neaptide_lab.policies.orders import DepthFirstFcfs, ShuffledFcfs
from neaptide_lab.policies.round_robin import RoundRobinScheduler
from neaptide_lab.policies.sglang import Lpm
from neaptide_lab.policies.vllm_v0 import VllmV0Fcfs, VllmV0Priority
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
    """The policy that the configuration names, without the parts that it leaves out.

    Raises:
        ValueError: the policy has no such part.
    """
    return without(POLICIES[config.policy], config.left_out)
