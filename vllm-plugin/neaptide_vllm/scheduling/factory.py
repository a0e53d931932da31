"""Makes the scheduler of ``--scheduler-cls neaptide_vllm.scheduler``: ours, or vLLM's own where ours does not fit."""

from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler

from neaptide_vllm.scheduling.contract import agreed, differences, facts_of
from neaptide_vllm.settings import Settings

logger = init_logger("vllm.neaptide")
MOST_NAMED = 3
"""Differences that the log line names."""


def make_scheduler(vllm_config: VllmConfig, **parts: Any) -> SchedulerInterface:
    """Ours over the one of vLLM's two schedulers that vLLM would take, or that one by itself.

    Raises:
        ValueError: a setting of the operator's is wrong.
    """
    Settings.of(vllm_config.additional_config)
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    reason = _why_not(vllm_config)
    if reason is None:
        try:
            from neaptide_vllm.scheduling.coserving import AsyncCoServing, SyncCoServing

            return (AsyncCoServing if is_async else SyncCoServing)(vllm_config=vllm_config, **parts)
        except Exception as error:
            logger.exception("neaptide: the scheduler does not start")
            reason = repr(error)
    logger.warning("neaptide: vLLM's own scheduler decides, and chats have no targets, because %s", reason)
    return (AsyncScheduler if is_async else Scheduler)(vllm_config=vllm_config, **parts)


def _why_not(vllm_config: VllmConfig) -> str | None:
    """Why our scheduler does not fit this vLLM or this model."""
    try:
        found = differences(facts_of(Path(vllm.__file__).parent), agreed())
    except (OSError, SyntaxError) as error:
        found = [f"its sources cannot be read ({error})"]
    if found:
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return f"vLLM {vllm.__version__} is not as expected: {'; '.join(found[:MOST_NAMED])}{more}"
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.runner_type == "pooling":
        return "the model generates no text"
    if model.is_encoder_decoder:
        return "the model has an encoder and a decoder"
    if vllm_config.diffusion_config is not None:
        return "the model is a diffusion model"
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return "prompts cannot be computed in chunks (--no-enable-chunked-prefill)"
    if model.is_hybrid and cache.mamba_cache_mode == "align":
        return "its Mamba layers take chunks of whole blocks only (--mamba-cache-mode align)"
    return None
