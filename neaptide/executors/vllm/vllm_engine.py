"""Runs vLLM's own start-up: configuration, workers with the model, KV cache.

Neaptide uses the workers only; vLLM's scheduler is never called.
"""

import argparse
import dataclasses
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from neaptide.engine.config import EngineConfig
from neaptide.executors.torch.device import cpu_flags
from neaptide.executors.vllm.arguments import check_device, command_line
from neaptide.executors.vllm.refusals import refuse_cache, refuse_model
from neaptide.executors.vllm.tensor_parallel import stay_down_after_a_failure, watch_workers
from neaptide.executors.vllm.worker import WorkerExtension, ignore_stop_signals

CPU_KV_BYTES = 1 << 30
"""Default on a CPU. On a GPU vLLM takes its share of the memory (``gpu_memory_utilization``)."""
_NATIVE_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16"})


def configured(config: EngineConfig, max_step_tokens: int) -> Any:
    """vLLM's configuration for an engine of ours; nothing runs yet.

    Args:
        max_step_tokens: most tokens of one step.

    Raises:
        ValueError: a value is invalid, or contradicts our settings.
        UnsupportedModelError: our step plans cannot drive the model.
        Exception: any other error of vLLM.
    """
    words = ["--model", config.executor.model_path, *command_line(config.executor.arguments)]
    wanted = _parsed(words)
    ours = _ours(config, max_step_tokens)
    if not hasattr(wanted, "swa_bounded_replay"):  # versions before 0.32
        del ours["swa_bounded_replay"]
    wanted = dataclasses.replace(wanted, **ours)
    vllm_config = wanted.create_engine_config(UsageContext.ENGINE_CONTEXT)
    check_device(config.executor.device, str(vllm_config.device_config.device_type))
    refuse_model(vllm_config)
    _check_block_size(vllm_config)
    return vllm_config


def start_engine(vllm_config: Any) -> Any:
    """Starts vLLM's ``EngineCore``, with model and KV cache in its workers.

    Raises:
        UnsupportedModelError: our step plans cannot drive the model.
        Exception: any other error of vLLM.
    """
    engine = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    try:
        refuse_cache(vllm_config.model_config.model, engine.scheduler.kv_cache_config.kv_cache_groups)
        if vllm_config.parallel_config.world_size > 1:
            engine.model_executor.collective_rpc(ignore_stop_signals)
            engine.model_executor.collective_rpc(stay_down_after_a_failure)
            watch_workers(engine.model_executor)
    except BaseException:
        engine.shutdown()
        raise
    return engine


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which raises an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"executor_arg: {message}")


def _parsed(words: list[str]) -> Any:
    parser = EngineArgs.add_cli_args(_Parser(allow_abbrev=False))
    try:
        return EngineArgs.from_cli_args(parser.parse_args(words))
    except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"executor_arg: {error}") from error


def _ours(config: EngineConfig, max_step_tokens: int) -> dict[str, Any]:
    """vLLM's arguments from the server's settings."""
    scheduler, cache = config.scheduler, config.cache
    return {
        "dtype": _dtype(config),
        "skip_tokenizer_init": True,
        # If a prompt fills the length, the runner samples one token more than planned.
        "max_model_len": scheduler.max_model_len + 1,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": max(max_step_tokens, scheduler.max_num_seqs),
        "block_size": cache.block_size or None,
        "kv_cache_memory_bytes": cache.kv_cache_bytes or (CPU_KV_BYTES if _on_cpu() else None),
        # One more, because vLLM reserves block 0.
        "num_gpu_blocks_override": None if cache.num_blocks is None else cache.num_blocks + 1,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        # Layers with a sliding window then keep whole tables, like ours.
        "disable_hybrid_kv_cache_manager": True,
        # Otherwise a window's keys would be missing after a prefix from our cache.
        "swa_bounded_replay": False,
        "generation_config": "vllm",
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def _dtype(config: EngineConfig) -> str:
    """``auto`` is the checkpoint's own dtype, or fp32 on a CPU without bf16 instructions, as in the torch executor."""
    if config.executor.dtype == "auto" and _on_cpu() and not cpu_flags() & _NATIVE_BFLOAT16:
        return "float32"
    return config.executor.dtype


def _check_block_size(vllm_config: Any) -> None:
    """Checks the block size early; vLLM itself would complain after loading the weights."""
    if not _on_cpu() or vllm_config.model_config.use_mla:  # a CPU has one MLA block size, whatever is configured
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = vllm_config.cache_config.block_size
    if not CPUAttentionBackend.supports_block_size(size):
        sizes = CPUAttentionBackend.get_supported_kernel_block_sizes()
        taken = " or ".join(f"multiples of {kind.base}" if hasattr(kind, "base") else str(kind) for kind in sizes)
        raise ValueError(f"block_size = {size} is not supported: vLLM's CPU attention needs {taken}")


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
