"""Scheduling policies by name: those of this package, and those of other packages."""

import inspect

from neaptide.engine import extensions
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.extensions import ExtensionError
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.baselines.vllm_v1 import VllmV1Fcfs, VllmV1Priority
from neaptide.engine.scheduler.packing import NeaptideScheduler
from neaptide.engine.scheduler.parts import without
from neaptide.engine.table import RequestTable

POLICIES: dict[str, type[Scheduler]] = {
    "neaptide": NeaptideScheduler,
    "fcfs": VllmV1Fcfs,
    "priority": VllmV1Priority,
}
"""Policies of this package."""
KIND = "policy"


def find_policy(name: str) -> type[Scheduler]:
    """The policy with this name: one of ours, an entry point, or ``module:Class``.

    Raises:
        ExtensionError: there is none, it cannot be loaded, or it is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    found = extensions.load(extensions.POLICIES, KIND, name)
    if found is None:
        raise extensions.refusal(extensions.POLICIES, POLICIES, KIND, name)
    if not isinstance(found, type) or not issubclass(found, Scheduler):
        raise ExtensionError(f"the policy {name!r} is no class derived from neaptide.policy.Scheduler")
    if inspect.isabstract(found):
        raise ExtensionError(f"the policy {name!r} lacks {', '.join(sorted(found.__abstractmethods__))}")
    return found


def check_name(name: str) -> None:
    """Checks the name of a policy without importing it, where the engine runs in another process.

    Raises:
        ExtensionError: there is no such policy.
    """
    if name in POLICIES or extensions.is_path(name):
        return
    if name not in extensions.known_names(extensions.POLICIES, POLICIES):
        raise extensions.refusal(extensions.POLICIES, POLICIES, KIND, name)


def policy_of(config: SchedulerConfig) -> type[Scheduler]:
    """The policy that the configuration names, without its disabled parts.

    Raises:
        ExtensionError: there is no such policy.
        ValueError: the policy has no such part.
    """
    return without(find_policy(config.policy), config.left_out)


def set_up(
    policy: type[Scheduler],
    config: EngineConfig,
    num_blocks: int,
    table: RequestTable,
    cost_model: CostModel,
    headroom: HeadroomPredictor,
) -> Scheduler:
    """An instance of the policy, with its KV cache.

    Raises:
        ExtensionError: the code of another package raised.
    """
    try:
        kv = _kv_cache(config.cache, policy, num_blocks, table)
        return policy(config.scheduler, kv, cost_model, headroom)
    except Exception as error:
        if (name := config.scheduler.policy) in POLICIES:
            raise
        raise ExtensionError(f"the policy {name!r} cannot be set up: {extensions.reason(error)}") from error


def _kv_cache(config: CacheConfig, policy: type[Scheduler], num_blocks: int, table: RequestTable) -> KVCacheManager:
    """The policy's own cache, or the engine's as the policy asks for it."""
    if policy.own_cache is not None and (own := policy.own_cache(config, num_blocks, table)) is not None:
        return own
    prefix_cache = config.enable_prefix_cache and policy.uses_prefix_cache
    host_blocks = config.num_host_blocks if policy.evicts_by_reuse else 0
    by_reuse, counted = policy.evicts_by_reuse, policy.counts_reuse
    return KVCacheManager(num_blocks, table, prefix_cache, by_reuse, counted, host_blocks, config.shared_reads)
