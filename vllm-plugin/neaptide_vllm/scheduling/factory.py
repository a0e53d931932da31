"""Makes the scheduler of ``--scheduler-cls neaptide_vllm.scheduler``."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import SchedulerInterface

from neaptide_vllm.scheduling.coserving import AsyncCoServing, SyncCoServing


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> SchedulerInterface:
    """Ours over the one of vLLM's two schedulers that vLLM would take."""
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    return (AsyncCoServing if is_async else SyncCoServing)(vllm_config=vllm_config, **parts)
